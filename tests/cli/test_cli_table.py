"""What commands print with --json."""

import json
import math

from shoal.cli.table import as_json


def test_json_has_null_where_a_number_is_not_finite_at_any_depth():
    told = {
        "days": math.inf,
        "rows": [(1, -math.inf), {"error": math.nan, 2: 0.5}],
        "name": "one",
        "sound": True,
    }
    read = json.loads(as_json(told), parse_constant=lambda name: name)
    assert read == {
        "days": None,
        "rows": [[1, None], {"error": None, "2": 0.5}],
        "name": "one",
        "sound": True,
    }
