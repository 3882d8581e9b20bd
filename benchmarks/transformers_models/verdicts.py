"""The verdict on a family, from its record.

A record has "family" and "kind". The other fields depend on how far the family came: "unbuilt" is the reason why no
model could be built, "checks" are the outcomes by column, and "calls" are the results of the attention calls (class,
operation, reason). "kinds" and "own" come from `watching`. "text_only" is the reason why the model runs without images,
and "ended" the reason why the process failed.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.transformers_models.outcomes import CRASHES, DIFFERS, EQUAL, NOT_JUDGED, REFUSED

Record = Mapping[str, Any]
COLUMNS = ("generate", "logits", "static cache", "padded", "packed", "batching", "absorbed", "images")
WRONG = (DIFFERS, CRASHES)
SIGNS = {EQUAL: "=", DIFFERS: "differs", REFUSED: "refused", CRASHES: "crashes", NOT_JUDGED: ""}
DENSE = "dense attention in torch"
OF_ABSORBED = (
    "Absorbed",
    "Indexed",
)  # how the class names in absorbed models begin; the column "absorbed" covers their calls


def verdict(record: Record) -> str:
    """One of the verdicts of docs/transformers_models.md, with the reason after a colon."""
    if "unbuilt" in record:
        return f"cannot be built: {record['unbuilt']}"
    checks = record.get("checks", {})
    found = [(column, word, why) for column, outcomes in checks.items() for word, why in outcomes]
    for wanted in (*WRONG, REFUSED):
        columns: dict[str, list[str]] = {}  # the reason -> the columns with that reason
        for column, word, why in found:
            if word == wanted:
                columns.setdefault("" if wanted == DIFFERS else f" ({why})", []).append(column)
        if columns:
            return f"{wanted}: " + "; ".join(", ".join(dict.fromkeys(each)) + why for why, each in columns.items())
    if "ended" in record:
        return f"{CRASHES}: {record['ended']}"
    if not any(word == EQUAL for _, word, _ in found):
        return f"cannot be built: {found[0][2] if found else 'nothing was compared'}"
    return "; ".join(_equal(record))


def _equal(record: Record) -> list[str]:
    calls = [call for call in record["calls"] if not call[0].startswith(OF_ABSORBED)]
    reasons = list(dict.fromkeys(reason for _, operation, reason in calls if operation == DENSE))
    own_code = ", ".join(record["own"])
    if not calls:
        if own_code:
            return [f"own code: {own_code}"]
        return ["no softmax"]
    if not reasons:
        words = [EQUAL]
    elif all(operation == DENSE for _, operation, _ in calls):
        words = [f"dense: {', '.join(reasons)}"]
    else:
        words = [f"{EQUAL}, partly dense: {', '.join(reasons)}"]
    return words + ([f"partly own code: {own_code}"] if own_code else [])


def is_wrong(record: Record) -> bool:
    return verdict(record).partition(":")[0] in WRONG


def cells(record: Record) -> list[str]:
    """The cells of the family's table row."""
    signs = []
    for column in COLUMNS:
        words = [word for word, _ in record.get("checks", {}).get(column, ())]
        worst = next((word for word in (*WRONG, REFUSED, EQUAL) if word in words), NOT_JUDGED)
        signs.append(SIGNS[worst])
    if "text_only" in record:
        signs[-1] = f"text only: {record['text_only']}"
    return [record["family"], ", ".join(record.get("kinds", ())), verdict(record), *signs]
