//! What no measurement can say: numbers that are none, and numbers that contradict one another.
//!
//! Never judges how good a number is.

use serde_json::Value;

use super::{Row, RowsError};

/// Things that are counted.
const COUNTS: [&str; 9] =
    ["finished", "failed", "refused", "retried", "lost", "migrated", "copies", "measured", "steps"];
/// Shares of a whole.
const SHARES: [&str; 2] = ["busy", "cached"];
/// What may be below 0: by how much a fit is off.
const SIGNED: [&str; 1] = ["bias"];
/// Sums of doubles end this far off.
const NEAR: f64 = 1e-9;

/// The row that `value` is, the `nth` of its file from 1.
pub(super) fn read(nth: usize, value: Value) -> Result<Row, RowsError> {
    let wrong = |why: String| RowsError::Row { row: nth, why };
    let measured = value.get("measured").and_then(Value::as_object);
    if let Some((name, value)) = measured.and_then(|all| all.iter().find(|(_, value)| !value.is_number())) {
        return Err(wrong(format!("measured.{name} is {value}, which is no number")));
    }
    let row: Row = serde_json::from_value(value).map_err(|error| wrong(error.to_string()))?;
    match problem(&row) {
        Some(why) => Err(wrong(why)),
        None => Ok(row),
    }
}

/// The first thing about a row that can not be, by the field's name.
fn problem(row: &Row) -> Option<String> {
    let number = |name: &str| row.measured.get(name).copied();
    for (name, &value) in &row.measured {
        let is = || format!("measured.{name} is {value}");
        if !value.is_finite() || (value < 0.0 && !SIGNED.contains(&name.as_str())) {
            return Some(format!("{}, which can not be: it is a finite number, 0 or more", is()));
        }
        if SHARES.contains(&name.as_str()) && value > 1.0 + NEAR {
            return Some(format!("{}, which can not be: a share is 1 at most", is()));
        }
        if COUNTS.contains(&name.as_str()) && value.fract() != 0.0 {
            return Some(format!("{}, which can not be: it is a count", is()));
        }
        if let Some((front, unit)) = name.split_once("_p99")
            && let Some(p50) = number(&format!("{front}_p50{unit}"))
            && value < p50 - p50 * NEAR
        {
            return Some(format!("{}, which can not be: it is below the p50, {p50}", is()));
        }
    }
    let batch = number("batch")?;
    let made = ["tokens_per_s", "experts_per_token", "experts_per_step"].into_iter();
    let (name, value) = made.filter_map(|name| Some((name, number(name)?))).find(|&(_, value)| value > 0.0)?;
    (batch < 1.0 - NEAR).then(|| {
        format!("measured.batch is {batch}, which can not be: measured.{name} is {value}, and a step has a sequence at least")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(measured: &Value) -> Option<String> {
        let row = json!({"verb": "bench", "setting": {"policy": "random"}, "measured": measured});
        read(3, row).err().map(|error| error.to_string())
    }

    // Symptom: rows with a negative time, a P99 below the P50 or no number at all were drawn and compared.
    #[test]
    fn what_can_not_be_is_refused_by_row_and_field() {
        for (measured, want) in [
            (json!({"ttft_p50_ms": null}), "row 3: measured.ttft_p50_ms is null, which is no number"),
            (json!({"batch": "12"}), "row 3: measured.batch is \"12\", which is no number"),
            (json!({"tpot_p50_ms": -2.5}), "row 3: measured.tpot_p50_ms is -2.5, which can not be"),
            (
                json!({"tpot_p50_ms": 20, "tpot_p99_ms": 5}),
                "row 3: measured.tpot_p99_ms is 5, which can not be: it is below",
            ),
            (json!({"route_p50_us": 2, "route_p99_us": 1}), "row 3: measured.route_p99_us is 1"),
            (
                json!({"batch": 0, "tokens_per_s": 80}),
                "row 3: measured.batch is 0, which can not be: measured.tokens_per_s",
            ),
            (json!({"batch": 0.5, "experts_per_step": 8}), "row 3: measured.batch is 0.5"),
            (json!({"busy": 1.2}), "row 3: measured.busy is 1.2"),
            (json!({"finished": 1.5}), "row 3: measured.finished is 1.5"),
        ] {
            let message = refused(&measured).expect("impossible");
            assert!(message.starts_with(want), "{measured}: {message}");
        }
        assert!(read(1, json!([])).is_err() && read(1, json!({"verb": "bench"})).is_err());
    }

    #[test]
    fn what_can_be_is_taken() {
        for measured in [
            json!({}),
            json!({"batch": 0, "tokens_per_s": 0}),
            json!({"batch": 1, "tokens_per_s": 3.5, "busy": 1.000_000_000_1, "cached": 0}),
            json!({"tpot_p50_ms": 20, "tpot_p99_ms": 20}),
            json!({"tpot_p99_ms": 1}),
            json!({"bandwidth_share": 1.3, "us": 0, "bias": -0.04}),
        ] {
            assert_eq!(refused(&measured), None, "{measured}");
        }
    }
}
