"""`txl eval`: score a split of a text with a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from ..config.problems import OPTION, Problems
from ..config.settings import EvalConfig, Lengths, TransformerXLConfig
from ..runtime.terminal import report_progress
from .shared import Part, Precision, RunFolder, Size, Sizes, SizesOrNone, TextPath, open_run

if TYPE_CHECKING:
    from ..data.corpus import Corpus
    from ..evaluation.dynamic import DynamicConfig
    from ..run.checkpoint import LoadedModel
    from ..run.trained import TrainedRun


@dataclass(frozen=True)
class Eval:
    """Score a text with a trained model, at one or many lengths."""

    folder: RunFolder
    data: TextPath = None
    """Score this text file, folder or archive, not the run's corpus: its test split, or all if it has none."""
    split: Part | None = None
    """The split to score; by default the one of [eval] when the checkpoint was saved. With train, valid or test, a text
    without splits is cut as for training. all: every split, one after another."""
    tgt_len: Size = None
    """Tokens per forward pass. All lengths default to the run's."""
    mem_len: Sizes = ()
    """Tokens of memory. Each value is scored with each given clamp_len and attn_len."""
    clamp_len: SizesOrNone = ()
    """Largest distance; greater ones are encoded as this one."""
    attn_len: SizesOrNone = ()
    """Number of keys that a query attends to, including its own."""
    same_length: bool = False
    """Set attn_len to mem_len, so every query attends to the same number of keys."""
    sliding: Annotated[int | None, arg(metavar="STRIDE")] = None
    """Read windows of tgt_len tokens without memory; each starts STRIDE tokens after the last. 1: every target has
    tgt_len tokens of context."""
    temperature: float = 1.0
    """Divide log-probabilities by this and normalise them again."""
    dynamic: Literal["sgd", "rms"] | None = None
    """Dynamic evaluation: take a gradient step on each segment after scoring it."""
    dynamic_lr: Annotated[float | None, arg(metavar="RATE")] = None
    """Learning rate of --dynamic; by default 0.1. Choose it on the validation split."""
    dynamic_decay: Annotated[float | None, arg(metavar="SHARE")] = None
    """Each step also moves the weights back towards the trained ones, by this share of the difference; by default 0."""
    dynamic_epsilon: Annotated[float | None, arg(metavar="EPSILON")] = None
    """rms: limits the steps of weights with small gradients; by default 0.1."""
    dynamic_tokens: Size = None
    """rms: measure gradients on this many tokens of the training split; by default 10,000; 0: all."""
    batch_size: Size = None
    """Number of streams (rows of a batch); by default the run's, or 1 with --sliding or --dynamic."""
    max_tokens: Size = None
    """Score at most N tokens; 0: all."""
    device: str = "auto"
    precision: Precision = "auto"
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        from ..evaluation.score import report_infinite, score_split, show_results
        from ..run.trained import split_of

        trained = open_run(self.folder, self.device, self.precision)
        problems, own = trained.problems, trained.config.eval
        problems.bound(self, "temperature", above=0)
        learning = self._learning(problems)
        usual = {"batch_size": 1} if learning or self.sliding is not None else {}  # they read one stream
        usual |= {} if self.sliding is None else {"context_len": 0}
        asked = {"batch_size": self.batch_size, "max_tokens": self.max_tokens}
        given = {name: value for name, value in asked.items() if value is not None}
        how = problems.attempt(lambda: replace(own, **usual | given), OPTION) or own
        lengths = self._lengths(trained)
        loaded = trained.load()
        loaded.model.softmax.temperature = self.temperature
        corpus = trained.corpus(loaded.vocab, self.data, self.split)
        split = split_of(corpus, self.split, how.split)
        learned = corpus  # by the model, for its gradients
        if learning and learning.rule == "rms" and "train" not in corpus.header.splits:
            learned = trained.corpus(loaded.vocab, None, "train")
        if split.documents is None:
            tokens = min(how.max_tokens or len(split.ids), len(split.ids))
            _warn_of_short_streams(tokens, min(how.batch_size, tokens - 1), lengths, loaded.config.model)
        results, precision = [], trained.precision
        if learning and precision == "fp16" and self.precision == "auto":
            precision = "fp32"  # its gradients have no scale
        for each in lengths:
            reader = self._reader(loaded, learned, each, how, precision, learning)
            results.append(score_split(reader, split, each, how, precision=precision))
        if self.json:
            facts = {"run": str(trained.path), "trained_on": trained.config.corpus.name, **split.about}
            facts |= {"unknown": split.unknown, "sliding": self.sliding, "temperature": self.temperature}
            facts |= {"dynamic": learning and asdict(learning), "results": [result.to_json() for result in results]}
            print(json.dumps(facts))
        else:
            show_results(split, results, how=self.title(learning))
        advice = f"Lower --dynamic-lr, which is {learning.lr:g}." if learning else "Score another checkpoint."
        report_infinite([result.nats for result in results], f"results are not finite: the weights diverged. {advice}")

    def _learning(self, problems: Problems) -> DynamicConfig | None:
        """How the model learns while it scores; None: it does not. Mistakes are added to the problems."""
        from ..evaluation.dynamic import DynamicConfig

        asked = {name: getattr(self, f"dynamic_{name}") for name in ("lr", "decay", "epsilon", "tokens")}
        given = {name: value for name, value in asked.items() if value is not None}
        rule = self.dynamic
        for name in given:
            if name in ("epsilon", "tokens") and rule != "rms":
                problems.append(f"--dynamic-{name} needs --dynamic rms.")
            elif rule is None:
                problems.append(f"--dynamic-{name} needs --dynamic sgd or rms.")
        if rule and self.precision == "fp16":
            problems.append("--precision must be auto, fp32 or bf16 with --dynamic, got fp16.")
        return problems.attempt(lambda: DynamicConfig(rule=rule, **given), "--dynamic-{}") if rule else None

    def title(self, learning: DynamicConfig | None) -> str:
        """The addition to a title: what differs from reading as in training."""
        words = [] if self.sliding is None else [f"windows sliding by {self.sliding}"]
        words += [] if self.temperature == 1 else [f"temperature {self.temperature:g}"]
        if learning is not None:
            rms = f", epsilon {learning.epsilon:g}" if learning.rule == "rms" else ""
            words.append(f"dynamic {learning.rule}, lr {learning.lr:g}, decay {learning.decay:g}{rms}")
        return "".join(f"; {part}" for part in words)

    def _lengths(self, trained: TrainedRun) -> list[Lengths]:
        """The lengths to score, without memory for --sliding. Mistakes are added to the run's problems."""
        if self.sliding is None:
            return trained.lengths(self)
        if self.mem_len or self.attn_len or self.same_length:
            trained.problems.append(
                "--sliding reads windows without memory: leave out --mem-len, --attn-len, --same-length."
            )
        found = trained.lengths(replace(self, mem_len=(0,), attn_len=(None,), same_length=False))
        if found:
            trained.problems.bound(self, "sliding", least=1, most=found[0].tgt_len)
        return found

    def _reader(
        self,
        loaded: LoadedModel,
        learned: Corpus,
        lengths: Lengths,
        how: EvalConfig,
        precision: str,
        learning: DynamicConfig | None,
    ) -> LoadedModel:
        """`loaded` with a model that reads as asked for. This first measures gradients if they are needed."""
        from ..evaluation.dynamic import Dynamic, relative_rms
        from ..evaluation.score import segments_of
        from ..evaluation.sliding import Sliding

        model: Any = loaded.model
        if self.sliding is not None:
            model = Sliding(model, lengths.tgt_len, self.sliding)
        if learning is not None:
            rms = None
            if learning.rule == "rms":
                part = replace(how, batch_size=1, max_tokens=learning.tokens)
                loader = segments_of(loaded, learned.split("train"), lengths, part)
                rms = relative_rms(model, report_progress(loader, "measuring gradients"), lengths, precision=precision)
            model = Dynamic(model, learning, rms)
        return loaded._replace(model=model)


def _warn_of_short_streams(tokens: int, streams: int, lengths: Sequence[Lengths], model: TransformerXLConfig) -> None:
    """Print a warning if a stream has less than twice the tokens that the model sees before a token."""
    longest = max(min(each.mem_len, each.attn_len or each.mem_len) for each in lengths)
    if longest and model.matches:
        longest = max(longest, model.match_window)
    if streams > 1 and tokens < 2 * longest * streams:
        short = f"has {tokens // streams:,} tokens, less than twice the {longest:,} that the model sees before a token"
        begins = f"txl: Each of the {streams} streams begins without a past"
        print(f"{begins}, and {short}: --batch-size 1 reads the text in one.", file=sys.stderr)
