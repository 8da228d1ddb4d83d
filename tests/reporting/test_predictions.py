"""Samples and confusion in the report."""

from __future__ import annotations

import base64
import dataclasses

from stoker.records.run import Example, ExampleSet
from stoker.reporting.run_documents import confusion_document
from stoker.reporting.run_page import render_html
from tests.reporting import story
from tests.reporting.test_html import Page, documents

WRONG = Example(index=7, target="cat", output="<dog> (91 %)", loss=3.25, picture=base64.b64encode(b"png").decode())
RIGHT = Example(index=0, target="dog", output="dog (99 %)", loss=0.01, values=(0.5, -1.0))
SHOWN = ExampleSet(
    split="test",
    num_samples=30,
    worst=(WRONG,),
    first=(RIGHT,),
    confusion=((9, 1, 0), (4, 6, 0), (0, 0, 10)),
    classes=("cat", "<dog>", "owl"),
)


def predictions(sets: list[ExampleSet]) -> str:
    """The page's section of samples."""
    page = render_html(story.report([], has_plan=False), sets)
    return page.partition("<h2>Samples</h2>")[2].partition("</section>")[0]


def test_samples_are_shown_with_what_was_wanted_and_what_came_out() -> None:
    """Escaped; a picture where there is one, else numbers; what is wrong in another colour."""
    page = Page(predictions([SHOWN]))
    assert page.open == []
    for expected in ("Largest losses, of 30 in test", "wanted cat", "<dog> (91 %)", "#7 · loss 3.25", "0.5, -1"):
        assert expected in page.text
    assert page.references == [f"data:image/png;base64,{WRONG.picture}"]
    assert 'class="bad">&lt;dog&gt;' in predictions([SHOWN])
    assert 'class="good">dog' in predictions([SHOWN])
    assert predictions([]) == ""


def test_a_class_whose_name_begins_like_another_is_not_taken_for_it() -> None:
    """`cat (wild)` is no `cat`, though its text begins with the same word."""
    other = dataclasses.replace(WRONG, output="cat (wild) (91 %)")
    assert 'class="bad">cat (wild)' in predictions([dataclasses.replace(SHOWN, worst=(other,))])
    same = dataclasses.replace(other, target="cat (wild)")
    assert 'class="good">cat (wild)' in predictions([dataclasses.replace(SHOWN, worst=(same,))])


def test_classes_that_are_called_alike_go_by_their_numbers() -> None:
    """Else a reader would not know which of two is meant."""
    (found,) = confusion_document([dataclasses.replace(SHOWN, classes=("cat", "dog", "cat"))])
    assert found["classes"] == ["0", "1", "2"]


def test_samples_with_names_go_by_them_and_the_scale_is_said() -> None:
    """The end of a long name; all of it where the picture is described."""
    name = "animals/photographs/cat/IMG_20260101_0007.jpg"
    named = dataclasses.replace(WRONG, name=name)
    text = Page(predictions([dataclasses.replace(SHOWN, worst=(named,), scale=(-0.5, 2.25))])).text
    assert "…s/cat/IMG_20260101_0007.jpg" in text
    assert "#7" not in text
    assert "In all pictures black is -0.5 and white 2.25." in text
    assert f'alt="{name}"' in predictions([dataclasses.replace(SHOWN, worst=(named,))])


def test_a_loss_of_nothing_has_no_sign() -> None:
    """PyTorch's cross-entropy of a sure and right answer is -0."""
    sure = dataclasses.replace(RIGHT, loss=-0.0, values=(-0.0, 1.0))
    text = Page(predictions([dataclasses.replace(SHOWN, worst=(sure,))])).text
    assert "#0 · loss 0" in text
    assert "0, 1" in text
    assert "-0" not in text


def test_a_confusion_matrix_names_the_pair_that_is_confused_most_often() -> None:
    """A row for each class of the targets."""
    (found,) = confusion_document([SHOWN, ExampleSet(split="valid", num_samples=3)])
    assert found["counts"] == [[9, 1, 0], [4, 6, 0], [0, 0, 10]]
    assert found["classes"] == ["cat", "<dog>", "owl"]
    assert found["words"] == "most often <dog> taken for cat, 4 times"


def test_a_matrix_without_confusion_and_without_names_says_so() -> None:
    """Classes go by their numbers."""
    (found,) = confusion_document([ExampleSet(split="valid", num_samples=3, confusion=((2, 0), (0, 1)))])
    assert (found["words"], found["classes"]) == ("no class is taken for another", ["0", "1"])
    (found,) = confusion_document([ExampleSet(split="valid", num_samples=3, confusion=((2, 1), (0, 1)))])
    assert found["words"] == "most often 0 taken for 1, once"


def test_a_page_holds_samples_and_confusion_and_stays_well_formed() -> None:
    """With everything else, and in its own sections."""
    html = render_html(story.report(story.whole_run()), [SHOWN])
    page = Page(html)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert documents(html)["confusion"] == confusion_document([SHOWN])
    assert all(reference.startswith("data:") for reference in page.references)


def test_an_output_that_is_a_picture_is_shown_as_one() -> None:
    """With the sample, and the target where it is another one."""
    png = WRONG.picture
    both = dataclasses.replace(WRONG, target="", output="", output_picture=png, target_picture=png)
    found = Page(predictions([dataclasses.replace(SHOWN, worst=(both,), first=())]))
    assert len(found.references) == 3
    assert "output" in found.text
    assert "target" in found.text
    assert "wanted" not in found.text
