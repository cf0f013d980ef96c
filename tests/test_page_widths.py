"""Every page of the site loads without an error, fits the screen, clips no table or code, and has no tiny text."""

import json
import shutil

import pytest

from tests.support.site import ROOT, built_site, opened, served

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="not in a checkout")

DESK, PHONE, SMALL_PHONE = 1280, 390, 360

EVERYTHING_OPEN = """() => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const style = document.createElement("style");
  style.textContent = ".md-typeset .tabbed-block, .steps .frames > div { display: block !important }";
  document.head.append(style);
}"""

# For each table and code block that is wider than its box: the hidden width, whether it scrolls and a shadow shows this, and
# the beginning of its text.
CLIPPED = """() => [...document.querySelectorAll(".md-content table, .md-content pre")].flatMap((node) => {
  const box = node.matches("pre") ? node.querySelector("code") ?? node
    : node.closest(".md-typeset__scrollwrap") ?? node.parentElement;
  const hidden = Math.max(box.scrollWidth - box.clientWidth, box.getBoundingClientRect().right - innerWidth);
  if (hidden <= 1) return [];
  const style = getComputedStyle(box), scrolls = ["auto", "scroll"].includes(style.overflowX);
  const shadow = style.backgroundAttachment.includes("local") && style.backgroundImage.includes("gradient");
  const text = node.textContent.trim().replace(/\\s+/g, " ").slice(0, 60);
  return [{ hidden: Math.round(hidden), visibly: scrolls && shadow, what: `${node.tagName.toLowerCase()}: ${text}` }];
})"""

FIGURES = ".md-content :is(svg[role=img], .sd-widget, .steps, .legend)"

# For each of the figures: its smallest text, if below 12 px, up to rounding. Widgets are drawn again after a frame.
SMALL_TEXT = """async (selector) => {
  const figures = document.querySelectorAll(selector);
  if (figures.length) await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const size = (node) => {
    const matrix = node.getScreenCTM?.() ?? { b: 0, d: 1 };
    return parseFloat(getComputedStyle(node).fontSize) * Math.hypot(matrix.b, matrix.d);
  };
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
  return [...figures].flatMap((figure) => {
    const [smallest] = [...figure.querySelectorAll("*")].filter(hasText).map((node) => [size(node), node.textContent.trim()])
      .sort(([one], [other]) => one - other);
    return smallest?.[0] < 11.9 ? [`${smallest[0].toFixed(1)} px: ${smallest[1].slice(0, 60)}`] : [];
  });
}"""

TOO_WIDE = "document.documentElement.scrollWidth > window.innerWidth"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve a copy of the site with an empty search index: every page loads the index, and the whole one takes long."""
    folder = tmp_path_factory.mktemp("site") / "copy"
    shutil.copytree(built_site().folder, folder)
    index = folder / "search/search_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"docs": []}))
    with served(folder) as server:
        yield server


def test_every_page_loads_and_nothing_is_clipped_or_too_small_on_a_desk_or_a_phone(server):
    """The small phone is narrower than a tablet without sidebars, so tables and code have the least room there."""
    site, wrong = built_site(), []
    with opened(server) as (tab, complaints):

        def look(width: int) -> None:
            tab.set_viewport_size({"width": width, "height": 800})
            if tab.evaluate(TOO_WIDE):
                wrong.append(f"{page}: wider than the screen at {width}")
            for found in tab.evaluate(CLIPPED):
                if width == DESK or not found["visibly"]:
                    wrong.append(f"{page} at {width}: {found['hidden']} px of {found['what']}")

        for file in site.pages():
            page = file.relative_to(site.folder).as_posix().removesuffix("index.html")
            if page == "404.html":
                continue
            tab.set_viewport_size({"width": DESK, "height": 800})
            tab.emulate_media(color_scheme="light")
            tab.goto(server.address + page)
            tab.evaluate(EVERYTHING_OPEN)
            look(DESK)
            if tab.query_selector(FIGURES):
                tab.set_viewport_size({"width": PHONE, "height": 800})
                wrong += [f"{page} at {PHONE}: text of {found}" for found in tab.evaluate(SMALL_TEXT, FIGURES)]
            tab.emulate_media(color_scheme="dark")
            look(SMALL_PHONE)
            wrong += [f"{page}: {complaint}" for complaint in complaints]
            complaints.clear()
    assert not wrong, "\n".join(wrong)
