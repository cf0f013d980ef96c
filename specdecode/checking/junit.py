"""A report as JUnit XML, the format that viewers of test results read: one test case for each check."""

import re
from xml.etree import ElementTree

from specdecode.checking.report import Report

NOT_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""A character that XML 1.0 cannot hold, such as a control character in the message of an exception."""


def junit(report: Report) -> bytes:
    r"""Return the report as JUnit XML in UTF-8.

    A failure's text is the check's lines of the report and the suspects. The suite's output is the whole report.

    >>> from specdecode.checking.report import Check
    >>> report = Report([Check("greedy", False, None, "every token\nis 3, expected 4"), Check("joint", True, 0.5, "all")])
    >>> print(junit(report).decode().partition("  <system-out>")[0])
    <?xml version='1.0' encoding='utf-8'?>
    <testsuite name="specdecode check" tests="2" failures="1" errors="0" skipped="0" time="0.00">
      <testcase classname="specdecode check" name="greedy">
        <failure message="every token">FAIL  greedy                every token
          is 3, expected 4
    <BLANKLINE>
    No mistake in the list fits what was seen.</failure>
      </testcase>
      <testcase classname="specdecode check" name="joint" />
    <BLANKLINE>
    """
    title = clean(f"specdecode check {report.subject}".rstrip())
    failures = sum(not check.passed for check in report.checks)
    suite = ElementTree.Element(
        "testsuite",
        name=title,
        tests=str(len(report.checks)),
        failures=str(failures),
        errors="0",
        skipped=str(sum(not check.answered for check in report.checks)),
        time=f"{report.seconds:.2f}",
    )
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=check.name)
        if not check.passed:
            failure = ElementTree.SubElement(case, "failure", message=clean(check.detail.partition("\n")[0]))
            failure.text = clean("\n".join([*check.lines(width=0), *report.suspect_lines()]))
        elif not check.answered:
            ElementTree.SubElement(case, "skipped", message=clean(check.detail))
    ElementTree.SubElement(suite, "system-out").text = clean(str(report))
    ElementTree.indent(suite)
    document: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return document


def clean(text: str) -> str:
    """Return the text with U+FFFD in place of each character that XML cannot hold."""
    return NOT_XML.sub("\ufffd", text)
