"""No page of the site hides a part of a table or of code: on a desk all of it is shown, on smaller screens the rest is a
scroll away, and a shadow says so.
"""

import pytest

from tests.support.site import ROOT, Site, built_site, opened, served

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="not in a checkout")

DESK, TABLET, PHONE = 1280, 768, 390

EVERYTHING_OPEN = """() => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const style = document.createElement("style");
  style.textContent = ".md-typeset .tabbed-block { display: block !important }";
  document.head.append(style);
}"""

# Of each table and block of code: what is not seen of its width, whether it can be scrolled, and whether a shadow says so.
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


@pytest.fixture(scope="module")
def site() -> Site:
    return built_site()


@pytest.fixture(scope="module")
def server(site):
    with served(site) as server:
        yield server


def test_no_table_or_code_is_clipped_on_a_desk_a_tablet_or_a_phone(site, server):
    wrong = []
    with opened(server) as (tab, _):
        tab.route("**/search/**", lambda route: route.abort())  # the search's index is not looked at
        for file in site.pages():
            page = file.relative_to(site.folder).as_posix().removesuffix("index.html")
            if page == "404.html":
                continue
            tab.goto(server.address + page)
            tab.evaluate(EVERYTHING_OPEN)
            for width in (DESK, TABLET, PHONE):
                tab.set_viewport_size({"width": width, "height": 800})
                for found in tab.evaluate(CLIPPED):
                    if width == DESK or not found["visibly"]:
                        wrong.append(f"{page} at {width}: {found['hidden']} px of {found['what']}")
    assert not wrong, "\n".join(wrong)
