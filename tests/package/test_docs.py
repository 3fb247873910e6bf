"""The pages: their examples run, and the site is built without a warning,
whole and from this machine alone."""

import html.parser
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
import time

import pages
import processes
import pytest
from checkout import ROOT, TESTS
from pages import PREFIX, messages

import gradckpt

PAGES = {path.name: path.read_text() for path in [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"]}

#: Pages for contributors, which are not in the site.
INSIDE = {"architecture.md", "decisions.md"}

#: A fenced block, or a comment that makes what the page takes for granted: <!-- python ... -->.
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$|^<!-- python\n(.*?)^-->$", re.M | re.S)

#: Why a fragment is not run; it stands above its ```py.
REASON = re.compile(r"<!-- not run: \S.* -->\n\Z")


def program_of(text):
    """The python blocks of a page and its set-up comments, in their order."""
    parts = (found[3] or found[2] for found in BLOCK.finditer(text) if found[3] or found[1] == "python")
    return "\n".join(parts)


def printed_by(text):
    """The ```text blocks that come right after a python block: what it prints."""
    blocks = list(BLOCK.finditer(text))
    for code, output in itertools.pairwise(blocks):
        if code[1] == "python" and output[1] == "text" and text[code.end() : output.start()] == "\n\n":
            yield output[2]


#: What is run in one process: a page, or a section of frameworks.md.
PROGRAMS = {name: text for name, text in PAGES.items() if program_of(text) and name != "frameworks.md"}
PROGRAMS |= {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGES["frameworks.md"], flags=re.M)[1:]}

#: Frameworks that are installed beside the tests' packages, and where.
ELSEWHERE = {"DeepSpeed": processes.ENGINES, "timm": processes.FRAMEWORKS, "torchtitan": processes.ENGINES}


def environment(folder=None):
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "NO_MKDOCS_2_WARNING": "1"}  # the latter: news of the theme's makers
    quiet |= {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # what docs/stats.md says of torch's profiler
    given = processes.environment(folder) if folder else {**os.environ, "PYTHONPATH": str(ROOT)}
    return {**given, "HF_HUB_OFFLINE": "1", **quiet}


def run(*command, cwd=ROOT, folder=None):
    return subprocess.run(command, env=environment(folder), cwd=cwd, capture_output=True, text=True, check=False)


# ---- examples ----


#: Runs the programs in the folders that it is given, each in a fork: it imports torch once for all.
FORKS = """
import os, runpy, sys
import torch, transformers.trainer, transformers.models.llama.modeling_llama
for folder in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        for number, name in (1, "out"), (2, "err"):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.argv[:] = ["page.py"]
        runpy.run_path("page.py", run_name="__main__")
        sys.exit()
    status = os.waitpid(pid, 0)[1]
    with open(os.path.join(folder, "ending"), "w") as file:
        file.write(str(status))
    os.rename(file.name, os.path.join(folder, "ended"))
"""


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """Those of the pages that are asked for, where their programs run one after the other."""
    asked = [item.callspec.params["page"] for item in request.session.items if item.function is test_examples_run]
    made = {page: tmp_path_factory.mktemp(page) for page in dict.fromkeys(asked)}
    for page, folder in made.items():
        (folder / "page.py").write_text(program_of(PROGRAMS[page]))
    forked = [folder for page, folder in made.items() if page not in ELSEWHERE]
    running = subprocess.Popen([sys.executable, "-c", FORKS, *forked], env=environment())
    yield made, running
    running.kill()
    running.wait()


@pytest.mark.parametrize("page", PROGRAMS)
def test_examples_run(folders, page):
    folder, running = folders[0][page], folders[1]
    if page in ELSEWHERE:
        before = [TESTS / "programs" / "torchvision_operators.py"] if page == "timm" else []
        done = run(sys.executable, *before, "page.py", cwd=folder, folder=ELSEWHERE[page])
        status, printed, said = done.returncode, done.stdout, done.stderr
    else:
        while not (folder / "ended").exists() and running.poll() is None:
            time.sleep(0.05)
        status, printed, said = ((folder / name).read_text() for name in ("ended", "out", "err"))
    assert (int(status), said) == (0, "")
    for output in printed_by(PROGRAMS[page]):
        assert output in printed


def test_each_section_of_frameworks_has_a_program():
    assert set(ELSEWHERE) <= set(PROGRAMS)
    assert all(map(program_of, PROGRAMS.values()))


def test_readme_links_to_what_is_there():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES["README.md"]):
        assert (ROOT / target).is_file(), target


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_says_why(page):
    text = PAGES[page]
    for found in BLOCK.finditer(text):
        if found[1] == "py":
            assert REASON.search(text[: found.start()]), found[0]
    # Python by another name, with a word after the language (which mkdocs does not take),
    # or indented.
    assert not re.findall(r"^```(?!(?:python|py)$)(?:py\S*|\S+ .*)$|^ +```py.*", text, re.M)


TRAIN = """
import torch
from torch.utils.checkpoint import checkpoint

layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(2):
    hidden = layer(torch.randn(32, 64))
    checkpoint(torch.nn.functional.gelu, hidden, use_reentrant=False).sum().backward()
    optimizer.step()
"""


def commands():
    """What pages tell people to type, as far as one process can run it; of lines that differ in
    their script and its arguments, one."""
    pattern = r"^(?:\$ )?((?:python -m )?gradckpt(?: doctor| run (?!\().*)?|python -m gradckpt\.run .*)$"
    lines = sorted({line for text in PAGES.values() for line in re.findall(pattern, text, re.M)})
    return list({re.sub(r"\w+\.py\b.*", "", line): line for line in lines}.values())


@pytest.mark.parametrize("line", commands())
def test_commands_run(line, tmp_path):
    for script in re.findall(r"\w+\.py\b", line):
        (tmp_path / script).write_text(TRAIN)
    done = run(sys.executable, "-m", *shlex.split(line.removeprefix("python -m ")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "compressed 2 of 2" in done.stderr or "run" not in line


# ---- the site ----


class Page(html.parser.HTMLParser):
    """What a built page loads, its anchors and classes, and the rows of its tables."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.anchors, self.classes, self.tables, self.text = [], set(), set(), [], ""
        self.article = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.article |= tag == "article"
        self.classes |= set((given.get("class") or "").split())
        if "id" in given:
            self.anchors.add(given["id"])
        if tag in ("script", "img", "iframe", "source"):
            self.loads.append(given.get("src") or "")
        if tag == "link":
            self.loads.append(given.get("href") or "")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(0)
        if tag in ("td", "th") and self.tables:
            self.tables[-1][-1] += 1

    def handle_endtag(self, tag):
        self.article &= tag != "article"

    def handle_data(self, data):
        if self.article:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = run(sys.executable, "-m", "mkdocs", "--no-color", "build", "--strict", "--site-dir", str(folder))
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return {path.name: Page(path) for path in folder.glob("*.html")}


def test_every_page_is_built(site):
    pages = PAGES.keys() - INSIDE - {"README.md"} | {"index.md", "changelog.md", "404.md"}
    assert set(site) == {name.replace(".md", ".html") for name in pages}
    assert all(len(page.text) > 1000 for name, page in site.items() if name != "404.html")
    assert "Turn it on" in site["index.html"].text
    assert "Keep a Changelog" in site["changelog.html"].text


def test_nothing_is_loaded_from_elsewhere(site):
    """Reading a page loads nothing from elsewhere: no fonts, no script."""
    for name, page in site.items():
        assert page.loads, name
        assert not [address for address in page.loads if "//" in address], name
        assert "mermaid" not in page.classes, name  # the theme would fetch a script to draw it


def test_tables_are_tables(site):
    for name, page in site.items():
        assert all(len(set(rows)) == 1 for rows in page.tables), name
        assert not re.search(r"^\s*\|.*\|.*\|\s*$", page.text.replace("```", ""), re.M) or name == "codecs.html", name


def test_the_sidebar_is_short():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"^ +- (?:.*: )?(\w+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(PAGES.keys() - INSIDE - {"README.md"} | {"index.md"})
    assert len(listed) <= 18


@pytest.mark.parametrize("name", PAGES)
def test_compress_and_use_reentrant_do_not_stand_in_one_dict(name):
    """Together they silence torch where gradckpt was not imported: see frameworks.md."""
    dicts = re.findall(r"\{[^{}]*\}", PAGES[name])
    assert not [text for text in dicts if "compress" in text and "use_reentrant" in text]


# ---- reference.md ----


MODULES = ("codecs", "compat", "config", "policies", "selectors")


def public_names():
    """Dotted name to object; one that the package has at the top is not repeated."""
    names = {name: getattr(gradckpt, name) for name in gradckpt.__all__ if name not in MODULES}
    top = {id(value) for value in names.values()}
    for module in map(gradckpt.__dict__.get, MODULES):
        short = module.__name__.partition(".")[2]
        found = {f"{short}.{name}": getattr(module, name) for name in module.__all__}
        names |= {name: value for name, value in found.items() if id(value) not in top}
    return names


def signature_of(value):
    bare = inspect.Parameter.empty
    signature = inspect.signature(value)
    parameters = [parameter.replace(annotation=bare) for parameter in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=bare)


def rows_of_reference(part):
    """The rows below the heading ``## part``, as lists of cells."""
    text = PAGES["reference.md"].split(f"\n## {part}\n")[1].split("\n## ")[0]
    rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] not in ("name", "keyword", "---")]


def code_in(cell):
    return re.findall("`([^`]+)`", cell)


def test_reference_lists_the_public_names_with_their_signatures():
    listed = {code.partition("(")[0]: code for row in rows_of_reference("Names") for code in code_in(row[0])}
    names = public_names()
    assert listed.keys() == names.keys()
    assert len(listed) == len(rows_of_reference("Names"))
    for name, code in listed.items():
        if "(" in code:
            assert code == name + str(signature_of(names[name])).replace("'", '"')
        assert "(" in code or not inspect.isroutine(names[name]), name


def test_reference_names_the_members_of_classes():
    for row in rows_of_reference("Names"):
        value = public_names()[code_in(row[0])[0].partition("(")[0]]
        if isinstance(value, type) and not issubclass(value, Exception):
            fields = getattr(value, "__dataclass_fields__", {})
            members = {key for key in vars(value) if not key.startswith("_")} - {*fields, "forward", "backward"}
            assert {key for key in members if f"`.{key}" not in row[1]} == set(), value


def test_reference_explains_each_keyword_once():
    names = public_names()
    defaults = {}
    for row in rows_of_reference("Names"):
        name, called, _ = code_in(row[0])[0].partition("(")
        for key, parameter in signature_of(names[name]).parameters.items() if called else ():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                given = parameter.default is not parameter.empty
                defaults.setdefault(key, set()).update({repr(parameter.default).replace("'", '"')} if given else set())
    rows = rows_of_reference("Keywords")
    listed = [key for row in rows for key in code_in(row[0])]
    assert sorted(listed) == sorted(defaults)
    for keys, kind, default, meaning in rows:
        assert set(code_in(default)) == set().union(*(defaults[key] for key in code_in(keys))), keys
        assert kind, keys
        assert meaning, keys


def test_reference_is_one_page_that_a_reader_can_hold():
    assert PAGES["reference.md"].count("\n") <= 150


# ---- errors.md ----


def test_every_error_is_explained():
    """The page has each message as the source does, unless the message itself says what to do.

    It does so by a second part, or by naming what it expected instead of a value.
    """
    page = " ".join(PAGES["errors.md"].split())
    bare = {text for text in messages() if text.startswith(PREFIX) and "; " not in text and not text.endswith(" not …")}
    assert len(bare) > 50
    assert sorted(t for t in bare if f"`{t}`" not in page and f"`{t.removeprefix(PREFIX)}`" not in page) == []


def test_no_error_is_made_up():
    """What the page says that gradckpt says is in its source."""
    found = messages()
    page = " ".join(PAGES["errors.md"].split())
    assert sorted(set(re.findall(r"`(gradckpt: [^`]+)`", page)) - found) == []


def test_every_reason_and_class_is_explained():
    header = (ROOT / "csrc" / "torch" / "tensor.h").read_text()
    reasons = re.findall(r'REASON\(GCK_\w+, *"(.*?)"\)', header)
    assert len(reasons) >= 10
    source = "".join(path.read_text() for path in ROOT.glob("gradckpt/**/*.py"))
    classes = re.findall(r"^class (\w+)\((?:\w+)?(?:Warning|Error|Exception)\)", source, re.M)
    assert "GradckptInactiveWarning" in classes
    assert [name for name in reasons + classes if name not in PAGES["errors.md"]] == []


def test_table_of_codecs():
    page = PAGES["codecs.md"]
    assert pages.page_with_table(page) == page, "run python tests/helpers/pages.py docs/codecs.md"
