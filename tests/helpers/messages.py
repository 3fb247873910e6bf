"""The messages of gradckpt, read from its sources, with … for what varies."""

import ast
import inspect
import re

import torch.utils.checkpoint as torch_checkpoint
from checkout import ROOT

PREFIX = "gradckpt: "

#: Functions that put the prefix before a warning, or before a line in the log.
SAY = {"warn_inactive", "say", "activity.say"}

#: What shows its first argument to the user as it is.
SHOW = re.compile(r"logger\.\w+|logging\.getLogger\('gradckpt'\)\.\w+|warnings\.warn|rank_zero_info|sys\.exit")

#: Of Python and of torch's C++, to the letter.
NOT_OF_CHECKPOINT = re.compile(
    r"tuple index out of range|generator raised StopIteration|module 'gradckpt\.\w+' has no attribute …"
    r"|checkpoint\(\) (missing 1 required positional|got multiple values for) argument:? 'function'"
    r"|one of the variables needed for gradient computation has been modified by an inplace operation: .*"
    r"|Trying to use a saved tensor that has been detached in-place.*"
)

#: A ValueError there is the parser's, which puts the program's name before it.
PARSED = {ROOT / "gradckpt" / name for name in ("run.py", "_script.py")}

#: The middle of a message: of setup.py; and of a plan, which says why a step cannot be simulated.
PARTS = {"CudaError", "NotSimulated"}


def template(node):
    """A text of the source; not a text: …"""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "…"


def texts_of_python(tree):
    """All texts but docstrings."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in parts:
            yield template(node)


def messages_of_python(tree):
    """What is raised, warned of or logged; returned to be raised: what begins with the prefix."""
    yield from (text for text in texts_of_python(tree) if text.startswith(PREFIX) and "%" not in text)
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args or ast.unparse(call.func) in PARTS:
            continue
        if ast.unparse(call.func) in SAY:
            yield PREFIX + template(call.args[0])
        elif isinstance(node, ast.Raise) or SHOW.fullmatch(ast.unparse(call.func)):
            yield re.sub("%[sdr]", "…", template(call.args[0]))


def messages_of_c(source):
    """The first text of each call that raises or warns, and any that begins with the prefix."""
    literals = r'(?:"(?:[^"\\\n]|\\.)*"\s*)+'
    raised = re.findall(rf'PyErr_(?:SetString|Format|WarnEx)\([^";]*?({literals})', source)
    for each in {*raised, *re.findall(literals, source)}:
        text = re.sub(r"%(?:\.\d+)?(?:ll|z)?[a-zA-Z]", "…", "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', each)))
        if each in raised or text.startswith(PREFIX):
            yield text.replace('\\"', '"')


def plain(text):
    """With single spaces, one … for several, and without lines after a colon: a command, a list."""
    text = re.sub(r":\n.+", ":", text.replace("\\n", "\n"), flags=re.S)
    return re.sub("…+", "…", " ".join(text.split()))


def messages():
    """Every message that says something itself."""
    found = set()
    for path in [*ROOT.glob("gradckpt/**/*.py"), ROOT / "setup.py"]:
        texts = messages_of_python(ast.parse(path.read_text()))
        found |= {PREFIX + text if path in PARSED and not text.startswith(PREFIX) else text for text in texts}
    for path in ROOT.glob("csrc/**/*.c"):
        found |= set(messages_of_c(path.read_text()))
    return {text for text in map(plain, found) if len(re.findall("[a-z]", text.partition(" ")[2])) > 3}


def is_of_torch(text):
    """Return whether a message is torch's or Python's own."""
    if NOT_OF_CHECKPOINT.fullmatch(text) or text.startswith("torch.utils.checkpoint"):
        return True
    torchs = " ".join(plain(each) for each in texts_of_python(ast.parse(inspect.getsource(torch_checkpoint))))
    return all(part.strip(" .") in torchs for part in re.split(r"…|(?<=\.) ", text))
