"""libfabric's manual pages, as installed: which of them describes a name, and those
that the book needs as HTML."""

import collections
import functools
import glob
import gzip
import html
import os
import re
import subprocess


def folders():
    """Where manual pages may be: beside the libfabric that the programs use, first."""
    homes = [os.environ.get("LIBFABRIC_HOME"), "/opt/amazon/efa", "/usr/local", "/usr"]
    return [f"{home}/share/man" for home in homes if home]


def read(path):
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        return file.read()


# What memory may be used for: these are capabilities and flags of completions, too.
ACCESS = {"FI_SEND", "FI_RECV", "FI_READ", "FI_WRITE", "FI_REMOTE_READ",
          "FI_REMOTE_WRITE"}


class Manual:
    def __init__(self, where=None):
        self.paths = {}  # "fi_cq_read(3)": the file with its text
        self.needed = set()  # "fi_cq(3)": the pages that something links to
        self.texts = {}
        for folder in where or folders():
            for path in sorted(glob.glob(f"{folder}/man[137]/f*")):
                match = re.fullmatch(r"(fi_\w+|fabric)\.([137])(\.gz)?",
                                     os.path.basename(path))
                if match:
                    self.paths.setdefault(f"{match[1]}({match[2]})", self._file(path))
        self.names = {}  # the file: the page's own name
        for path in set(self.paths.values()):
            name = os.path.basename(path).removesuffix(".gz")
            self.names[path] = re.sub(r"\.(\d)$", r"(\1)", name)
            self.texts[self.names[path]] = read(path)
        # How often each page has a word, and which words are terms in a list of it.
        self.counts = {page: collections.Counter(re.findall(r"\w+", text))
                       for page, text in self.texts.items()}
        self.terms = {page: set(re.findall(r"\w+", "\n".join(
            re.findall(r"^\.TP\n(.*)", text, re.M))))
                      for page, text in self.texts.items()}

    @staticmethod
    def _file(path):
        """Follows links, those of the file system and those of troff."""
        path = os.path.realpath(path)
        so = re.match(r"\.so (man\d/\S+)", read(path))
        if so:
            for end in "", ".gz":
                target = f"{os.path.dirname(os.path.dirname(path))}/{so[1]}{end}"
                if os.path.exists(target):
                    return os.path.realpath(target)
        return path

    @functools.lru_cache(maxsize=None)
    def page_of(self, name):
        """The page that describes a name of libfabric's, like "fi_cq(3)", or None."""
        for section in "37":
            path = self.paths.get(f"{name}({section})")
            if path:
                return self.names[path]
        if name in ACCESS and "fi_mr(3)" in self.texts:
            return "fi_mr(3)"
        best = None
        for page, counts in self.counts.items():
            count = counts[name]
            if count:
                # What a page is about is a term in a list of it. The pages of section 7
                # only tell how a provider does it.
                rank = (name in self.terms[page], page.endswith("(3)"), count, page)
                best = max(best or rank, rank)
        return best and best[-1]

    def link(self, name, section=None):
        """Where the book has a name, or None. With a section, it is a page's."""
        if section:
            page = self.names.get(self.paths.get(f"{name}({section})"))
        else:
            page = self.page_of(name)
        if not page:
            return None
        self.needed.add(page)
        place = "" if section else self._place(page, name)
        return f"man/{file_name(page)}" + (place and f"#{place}")

    @functools.lru_cache(maxsize=None)
    def _place(self, page, name):
        """Where a page describes a name: below a heading, or in a list of terms."""
        found = [id for id in self._places(page) if re.search(
            rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", id.replace("_/_", " "))]
        return found[0] if found else ""

    @functools.lru_cache(maxsize=None)
    def _places(self, page):
        return [id for heading in (r"<h\d[^>]*", "<dt")
                for id in re.findall(rf'{heading} id="([^"]*)"', self._html(page))]

    @functools.lru_cache(maxsize=None)
    def _html(self, page):
        done = subprocess.run(["mandoc", "-Thtml", "-O", "fragment"], check=False,
                              input=self.texts[page], text=True, capture_output=True)
        text = re.sub(r'(?s)<table class="(head|foot)">.*?</table>', "", done.stdout)
        # Within <pre>, a line has ended already.
        text = re.sub(r"(?s)<pre.*?</pre>",
                      lambda match: match[0].replace("\n<br/>\n", "\n"), text)
        text = re.sub(r"<(/?)h2\b", r"<\1h3", text)
        text = re.sub(r"<(/?)h1\b", r"<\1h2", text)
        text = re.sub(r'(?s)<table class="tbl">.*?</table>',
                      r'<div class="table" tabindex="0">\g<0></div>', text)
        return re.sub(r"<pre\b", '<pre tabindex="0"', text)

    def render(self, page):
        """A page as HTML, with links to the others that the book has."""
        def see(match):
            other = self.names.get(self.paths.get(f"{match[2]}({match[3]})"))
            if other not in self.needed or other == page:
                return match[0]
            return f'<a href="{file_name(other)}">{match[0]}</a>'

        return re.sub(r"(<[bi]>)?\b(fi_\w+|fabric)(?:</[bi]>)?\(([137])\)", see,
                      self._html(page))


def file_name(page):
    """fi_cq.3.html for fi_cq(3)."""
    return html.escape(re.sub(r"\((\d)\)", r".\1.html", page))
