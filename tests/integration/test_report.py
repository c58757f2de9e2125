"""tools/report.py on runs of two epochs: what stands on its page, how a browser shows it, and what
it refuses."""

import html
import json
import re
import shutil
import subprocess

import pytest
from tool_cases import assert_one_line, command

from swinv2_moe.measure.report_validation import ReportValidation
from swinv2_moe.measure.run_record import read_run

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PANELS = ["Loss", "Accuracy", "Learning rate", "Gradient norm", "Throughput"]
PANELS += ["Waiting for data", "Memory"]
EXPERT_PANELS = ["Auxiliary loss", "Dropped tokens", "Routing entropy"]
LAYERS = ["stage 1, block 0", "stage 2, block 0"]
# Both pages as frames, each of a width of its own; what they look like ends up in the document
PROBE = """<body><script>
const frames = %s.map(([page, width]) => { const frame = document.createElement("iframe");
  Object.assign(frame, {srcdoc: page, width, height: 900}); document.body.append(frame)
  return frame })
addEventListener("load", () => { const result = frames.map(frame => {
  const page = frame.contentDocument, own = ".wide, pre"
  const inside = e => e.closest("svg") || e.closest(own) && !e.matches(own)
  return {
    width: frame.contentWindow.innerWidth, scroll: page.documentElement.scrollWidth,
    outside: [...page.querySelectorAll("body *")].filter(e => !inside(e) &&
      e.getBoundingClientRect().right > frame.contentWindow.innerWidth + 1)
      .map(e => e.outerHTML.slice(0, 80)),
    panels: [...page.querySelectorAll("figure")].map(figure => {
      const drawn = figure.querySelector("svg, img")
      const box = drawn.getBoundingClientRect()
      return {title: figure.querySelector("h3").textContent, width: box.width, height: box.height,
              paths: drawn.querySelectorAll("path").length, pixels: drawn.naturalWidth || 0} }),
    images: [...page.images].map(image => image.naturalWidth),
    page: getComputedStyle(page.body).backgroundColor, text: getComputedStyle(page.body).color,
    ticks: [...new Set([...page.querySelectorAll("svg text")].map(t => getComputedStyle(t).fill))],
  } })
  document.body.innerHTML = ""; document.body.append(JSON.stringify(result)) })
</script></body>"""


@pytest.fixture
def report(monkeypatch, capsys):
    """`report(*arguments)`: tools/report.py in this process."""
    return command("report", monkeypatch, capsys)


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    """The page of one run and that of two, as tools/report.py writes them."""
    with pytest.MonkeyPatch.context() as patch:
        written = []
        for options in ([], ["--compare", runs / "dense"]):
            file = tmp_path_factory.mktemp("pages") / "page.html"
            run = command("report", patch, _NoCapture())
            assert run(runs / "experts", "--output", file, *options).status == 0
            written.append(file.read_text())
    return written


class _NoCapture:
    """In capsys's place, which no module's fixture can have."""

    def readouterr(self) -> tuple[str, str]:
        return "", ""


def titles(page: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r"<figure><h3>(.*?)</h3>", page)]


def test_what_one_page_shows(pages):
    page = pages[0]
    assert set(titles(page)) == {
        *(PANELS + EXPERT_PANELS + ["Images and layers"]),
        *(f"Expert load, {layer}" for layer in LAYERS),
    }
    samples = page[page.index("<h2>Some of the images") :]
    assert samples.count('class="card sample"') == 8
    assert len(re.findall(r"[✓✗] (red|blue)</h3>", samples)) == 8
    assert "Confusion matrix" in page
    assert "All 2 classes" in page
    for word in ("finished", "TRAIN.WARMUP_EPOCHS", "images/s, median"):
        assert word in page
    assert "top-5" not in page  # of two classes


def test_a_page_shows_what_is_known_of_the_environment(pages, runs):
    """No commit, for example, where the code is no git checkout."""
    (recorded,) = read_run(runs / "experts").environments
    known = [name for name, value in recorded.items() if value is not None]
    assert {"started", "command", "torch"} <= set(known)
    for name in recorded:
        assert (f"<tr><th>{name}</th><td>" in pages[0]) == (name in known), name


def test_a_page_needs_nothing_else(pages):
    for page in pages:
        addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert addresses
        assert all(address.startswith(("data:", "#")) for address in addresses)
        assert "<script" not in page
        assert len(page) < 2e6
        found = re.findall(r' id="([^"]+)"', page)
        assert len(found) == len(set(found))


def test_two_runs_side_by_side(pages):
    page = pages[1]
    assert "experts beside dense" in page
    assert {*PANELS, *EXPERT_PANELS} < set(titles(page))  # shared
    assert re.search(r"<td>MODEL.MOE.NUM_EXPERTS</td>.*<td>6</td><td>0</td>", page)
    assert page.count("<h2>Some of the images") == 2


def test_without_the_images_or_a_checkpoint_the_rest_is_there(report, runs, tmp_path):
    gone = tmp_path / "run"
    shutil.copytree(runs / "experts", gone, symlinks=True)
    # into the run directory
    finished = report(gone, "--opts", "DATA.PATH", tmp_path / "nowhere")
    assert finished.status == 0
    assert "warning: No predictions: DATA.PATH" in finished.err
    assert "No predictions: DATA.PATH" in html.unescape((gone / "report.html").read_text())
    shutil.rmtree(gone / "checkpoints")
    (gone / "summary.json").unlink()
    assert report(gone).status == 0
    page = html.unescape((gone / "report.html").read_text())
    assert "No predictions: RUN" in page
    assert "not finished, last logged at step" in page
    assert "Loss" in titles(page)


def test_data_with_other_class_names(report, runs, make_photographs, tmp_path):
    """Images of the unknown class are left out."""
    data = make_photographs()
    for split in ("train", "val"):
        (data / split / "blue").rename(data / split / "azure")
    finished = report(runs / "experts", "--data", data, "--output", tmp_path / "page.html")
    assert finished.status == 0
    assert "warning: 1 of 2 classes of the data are unknown" in finished.err
    page = html.unescape((tmp_path / "page.html").read_text())
    assert "unknown to the checkpoint, their 8 validation images are left out: azure" in page
    assert set(re.findall(r"[✓✗] (\w+)</h3>", page)) == {"red"}
    assert set(re.findall(r'<div class="guess">(\w+)', page)) == {"blue", "red"}


def test_it_says_what_evaluate_and_the_validation_say(report, runs, tmp_path, monkeypatch, capsys):
    """The matrix, the classes and the mistakes are those of as many images."""
    evaluate = command("evaluate", monkeypatch, capsys)
    measured = tmp_path / "accuracy.json"
    assert evaluate("--resume", runs / "experts", "--output", measured).status == 0
    results = json.loads(measured.read_text())
    best = json.loads((runs / "experts" / "summary.json").read_text())["best_val_top1"]
    assert report(runs / "experts", "--output", tmp_path / "page.html").status == 0
    page = html.unescape((tmp_path / "page.html").read_text())
    validation = page[page.index("<h2>Result on") :]
    top1 = re.search(r">top-1</span><b>([\d.]+)%", validation)[1]
    assert top1 == f"{results['top1']:.2f}" == f"{best:.2f}"
    cells = re.findall(r'class="(hit|miss)"[^>]*>(\d*)</td>', validation)
    counts = {"hit": 0, "miss": 0}
    for kind, count in cells:
        counts[kind] += int(count or 0)
    assert sum(counts.values()) == results["images"]
    assert counts["hit"] == round(results["images"] * results["top1"] / 100)


def test_some_of_the_images(report, runs, tmp_path):
    assert report(runs / "experts", "--images", 5, "--output", tmp_path / "page.html").status == 0
    page = html.unescape((tmp_path / "page.html").read_text())
    assert "5 images of 13, evenly spaced (--images 0: all)" in page


def test_watching_a_run_until_it_has_finished(report, runs, tmp_path, monkeypatch):
    """A page that reloads itself; no checkpoint is evaluated twice."""
    run = tmp_path / "run"
    shutil.copytree(runs / "experts", run, symlinks=True)
    metrics = (run / "metrics.jsonl").read_text()
    summary = (run / "summary.json").rename(tmp_path / "summary.json")
    (run / "metrics.jsonl").write_text("")
    pages, validated = [], []

    def sleep(seconds):
        if not (run / "metrics.jsonl").read_text():  # waits for the first logged step
            (run / "metrics.jsonl").write_text(metrics)
            return
        pages.append((seconds, (run / "report.html").read_text()))
        summary.rename(run / "summary.json")

    def count(*arguments):
        validated.append(arguments)
        return ReportValidation(problem="none")

    monkeypatch.setattr("swinv2_moe.commands.report.time.sleep", sleep)
    monkeypatch.setattr("swinv2_moe.measure.report_validation.validate", count)
    finished = report(run, "--watch", 7)
    assert finished.status == 0
    assert finished.out.startswith("waiting: ")
    (seconds, page), last = pages[0], (run / "report.html").read_text()
    assert seconds == 7
    assert 'http-equiv="refresh" content="7"' in page
    assert "not finished" in page
    assert "http-equiv" not in last
    assert len(validated) == 1


# arguments, and what the one line must name
BAD_INPUT = {
    "{runs}": "holds no run ... metrics.jsonl",
    "{runs}/nowhere": "nowhere ... not a run directory",
    "{runs}/experts --output {runs}/nowhere/page.html": (
        "--output ... page.html ... must be a file in a directory that exists"
    ),
    "{runs}/experts --data {runs}/nowhere": "--data ... nowhere ... not a directory",
    "{runs}/experts --checkpoint 99": "--checkpoint 99 ... checkpoints of the steps",
    "{runs}/experts --images -1": "--images ... -1",
    "{runs}/experts --watch -1": "--watch ... -1",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_gets_one_line(report, runs, words):
    assert_one_line(report(words, runs=runs), BAD_INPUT[words])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to look at the page with")
@pytest.mark.parametrize(
    ("scheme", "page", "text"), [(0, "20, 23, 26", "228, 232, 236"), (1, "246, 247, 248", None)]
)
def test_a_browser_shows_every_panel_and_nothing_overflows(pages, tmp_path, scheme, page, text):
    """At a phone's and a desk's width, in dark (0) and light (1)."""
    file = tmp_path / "probe.html"
    frames = [[pages[0], 390], [pages[1], 390], [pages[0], 1280], [pages[1], 1280]]
    file.write_text(PROBE % json.dumps(frames).replace("</", "<\\/"))
    words = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    body = re.search(r"<body>(\[.*\])</body>", done.stdout, re.DOTALL)[1]
    looks = json.loads(html.unescape(body))
    for look, (source, width) in zip(looks, frames, strict=True):
        assert look["width"] == width
        assert look["scroll"] <= width
        assert look["outside"] == []
        assert [panel["title"] for panel in look["panels"]] == titles(source)
        for panel in look["panels"]:
            assert panel["width"] > 250
            assert panel["height"] > 50
            assert panel["paths"] > 5 or panel["pixels"] >= 128
        assert all(pixels >= 128 for pixels in look["images"])
        assert look["page"] == f"rgb({page})"
        assert look["ticks"] == [look["text"]]  # figures take the page's ink
        assert text is None or look["text"] == f"rgb({text})"
