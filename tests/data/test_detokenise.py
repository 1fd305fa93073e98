"""Readable text from tokenised text: only spaces are removed, wherever the text is cut."""

# ruff: noqa: RUF001 - signs that look alike are what is tested.

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_xl.data.corpora.detokenise import BETWEEN, MARKS, Detokeniser, readable

SIGNS = [*MARKS, *BETWEEN, *"\"'().,;=$%/°’", "'s", "n't", "N", "<unk>", "<eos>", "1", "A", "dogs", "\t"]
signs = st.sampled_from(SIGNS)
words = signs | st.text(st.characters(exclude_characters=" \n", exclude_categories=["Cs"]), min_size=1, max_size=4)
spaces = st.sampled_from([" ", "\n", " \n", " \n ", "  "])
texts = st.lists(words | spaces, max_size=30).map("".join) | st.lists(words, max_size=20).map(" ".join)


@given(text=texts, cuts=st.lists(st.integers(0, 80)))
def test_pieces_give_the_same_text_as_the_whole(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    detokeniser = Detokeniser()
    for _ in range(2):  # a closed one is fit for another text
        pieces = [detokeniser.feed(text[start:end]) for start, end in pairwise(places)]
        assert "".join(pieces) + detokeniser.close() == readable(text)


@given(text=texts)
def test_only_spaces_and_marks_change(text: str) -> None:
    kept = "".join(MARKS.get(part, part) for part in re.split("( |\n)", text))
    assert readable(text).replace(" ", "") == kept.replace(" ", "")


@example(line='" b', before="\" ' a")
@given(line=st.lists(words).map(" ".join), before=st.lists(words).map(" ".join))
def test_a_line_is_independent_of_other_lines(line: str, before: str) -> None:
    assert readable(f"{before}\n{line}") == f"{readable(before)}\n{readable(line)}"


def test_a_word_is_final_after_its_space() -> None:
    detokeniser = Detokeniser()
    fed = [detokeniser.feed(piece) for piece in ("He", " said , ", "2013 – ", "1", "4 \n", "so")]
    assert fed == ["", "He said,", " 2013", "", "–14\n", ""]
    assert detokeniser.close() == "so"


WIKITEXT = {
    " = Homarus gammarus = \n \n": "= Homarus gammarus =\n\n",
    " = = = Iraq , 2003 – 11 = = = \n": "=== Iraq, 2003–11 ===\n",
    " a 14 @-@ game non @-@ conference schedule , 12 @,@ <unk> seats , 2 @.@ 8 km": (
        "a 14-game non-conference schedule, 12,<unk> seats, 2.8 km"
    ),
    ' its lead single " Underneath the Tree " became': 'its lead single "Underneath the Tree" became',
    ' " a study in rhythm . " \n " Race " was': '"a study in rhythm."\n"Race" was',
    " ( <unk> , And b ) ; sixteen ' fairly elderly ' residents": "(<unk>, And b); sixteen 'fairly elderly' residents",
    " The Jacksons ' 1980 song ; <unk> 's and Clayton 's": "The Jacksons' 1980 song; <unk>'s and Clayton's",
    " \" ' Imagine ' is a song \"": "\"'Imagine' is a song\"",
    " I gotta admit , she couldn 't , they 're O 'Brien 's": "I gotta admit, she couldn't, they're O'Brien's",
    " around 18 : 00 as follows : one": "around 18:00 as follows: one",
    " in 1990 – which replaced the Mumbai – Pune railway": "in 1990 – which replaced the Mumbai – Pune railway",
    " A & M and R & B , Simon & Garfunkel": "A&M and R&B, Simon & Garfunkel",
    " 160 km / h ( WWF / E ) 35 % , # 4": "160 km/h (WWF/E) 35%, #4",
    " US $ 12 @.@ 5 million , £ 28 million , € 5": "US$12.5 million, £28 million, €5",
    " at − 60 ° F ( − 51 ° C ) , 10 − 8 at 53 ° 25 ′ 12 ″ N": "at −60°F (−51°C), 10 − 8 at 53° 25′ 12″ N",
    " “ China ” and the ship ’ s O ’ Dell , Burns ’ world": "“China” and the ship’s O’Dell, Burns’ world",
    " said [ they 'll ] all : [ ... ]": "said [they'll] all: [...]",
}
PENN_TREEBANK = {
    " why do n't you say mr. jobs 's s&p 500-stock": "why don't you say mr. jobs's s&p 500-stock",
    " machinists ' union the <unk> ' sentencing": "machinists' union the <unk>' sentencing",
    " # N billion $ N billion us$ N a N N stake <unk> & sons": "#N billion $N billion us$N a N N stake <unk> & sons",
    " in the '80s we 're": "in the '80s we're",
}
BILLION_WORDS = {
    "It didn 't last , Stanley B. Greenberg 's firm said .": "It didn't last, Stanley B. Greenberg's firm said.",
    'Mr. Guzman say , " Get my gun , " before': 'Mr. Guzman say, "Get my gun," before',
    'It is over . "\nHe " said "': 'It is over."\nHe "said"',
    "WASHINGTON ( AP ) - As banks -- Wal-Mart , too -- ask": "WASHINGTON (AP) - As banks -- Wal-Mart, too -- ask",
    "at 3 : 30 p.m. in General Mills ' offices ; £ 4.4m": "at 3:30 p.m. in General Mills' offices; £4.4m",
    "L & L , Cheech & Chong ( CBS / AP ) ... 13.4 % !": "L&L, Cheech & Chong (CBS/AP) ... 13.4%!",
}


@pytest.mark.parametrize(("text", "expected"), [*WIKITEXT.items(), *PENN_TREEBANK.items(), *BILLION_WORDS.items()])
def test_real_text_becomes_readable(text: str, expected: str) -> None:
    assert readable(text) == expected
