//! Grammars of whole numbers between two bounds.
//!
//! Never writes a number that a double does not hold.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use crate::{
    server::{error::ApiError, fields::wrong_kind},
    types::shown_number,
};

/// What bounds a number in a schema: at least, at most, above, below.
const NAMES: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

/// The largest whole number that a bounded grammar writes: every one up to it is a double.
pub(super) const MOST: i64 = (1 << 53) - 1;

/// A bound of a schema.
#[derive(Debug, Clone)]
pub(super) struct Bound {
    /// The least or the greatest number; no farther out than [`MOST`].
    pub at: f64,
    pub is_low: bool,
    /// It is allowed itself.
    pub inside: bool,
    pub path: String,
}

impl Bound {
    /// Whether it leaves all numbers that a grammar writes on its side.
    pub fn is_far(&self) -> bool {
        self.inside && (if self.is_low { -self.at } else { self.at }) >= MOST as f64
    }
}

/// The bounds that the schema `map`, found at `path`, has. One so far out that no grammar reaches it allows all that is
/// written; one that allows nothing for being so is refused.
pub(super) fn bounds(map: &Map<String, Value>, path: &str) -> Result<Vec<Bound>, ApiError> {
    let there = NAMES.into_iter().filter_map(|name| Some((name, map.get(name)?, format!("{path}.{name}"))));
    let read = there.map(|(name, value, path)| {
        let at = value.as_f64().ok_or_else(|| wrong_kind(&path, "a number", value))?;
        let (is_low, inside, most) = (name.ends_with("inimum"), !name.starts_with("exclusive"), MOST as f64);
        let ahead = if is_low { at } else { -at };
        if ahead > most || (ahead >= most && !inside) {
            let why = format!("{path} is {}: bounds beyond +-{MOST} are not supported", shown_number(at));
            return Err(ApiError::invalid(&path, why));
        }
        Ok(Bound { at: at.clamp(-most, most), is_low, inside: inside || ahead < -most, path })
    });
    read.collect()
}

/// The least and the greatest integer that the schema `map`, found at `path`, allows; none where it says neither.
pub(super) fn of_schema(map: &Map<String, Value>, path: &str) -> Result<Option<(i64, i64)>, ApiError> {
    let (mut low, mut high) = (-MOST, MOST);
    let mut last = None;
    for Bound { at, is_low, inside, path } in bounds(map, path)? {
        match (is_low, inside) {
            (true, true) => low = low.max(at.ceil() as i64),
            (true, false) => low = low.max(at.floor() as i64 + 1),
            (false, true) => high = high.min(at.floor() as i64),
            (false, false) => high = high.min(at.ceil() as i64 - 1),
        }
        last = Some(path);
    }
    match last {
        Some(path) if low > high => {
            let [low, high] = [low, high].map(|end| shown_number(end as f64));
            Err(ApiError::invalid(&path, format!("{path} leaves no integer: the least is {low}, the greatest {high}")))
        }
        last => Ok(last.map(|_| (low, high))),
    }
}

/// What stands in a rule for the whole numbers from `low` to `high`, as JSON writes them. Both are within [`MOST`].
pub(super) fn span(low: i64, high: i64) -> String {
    assert!(-MOST <= low && low <= high && high <= MOST, "a span from {low} to {high}");
    let mut parts = Vec::new();
    if low < 0 {
        parts.push(format!("\"-\" ({})", naturals(high.min(-1).unsigned_abs(), low.unsigned_abs())));
    }
    if high >= 0 {
        parts.push(naturals(low.max(0).unsigned_abs(), high.unsigned_abs()));
    }
    format!("({})", parts.join(" | "))
}

/// From `low` to `high`: those of each number of digits by themselves.
fn naturals(low: u64, high: u64) -> String {
    let mut parts = Vec::new();
    let mut from = low;
    loop {
        let n_digits = from.to_string().len();
        let last = 10u64.pow(n_digits as u32) - 1;
        parts.push(digits(from.to_string().as_bytes(), last.min(high).to_string().as_bytes()));
        if last >= high {
            return parts.join(" | ");
        }
        from = last + 1;
    }
}

/// From `low` to `high`, which have as many digits.
fn digits(low: &[u8], high: &[u8]) -> String {
    let (Some((&a, low)), Some((&b, high))) = (low.split_first(), high.split_first()) else { return String::new() };
    let n = low.len();
    let is_all = |digits: &[u8], which| digits.iter().all(|&digit| digit == which);
    let mut parts = Vec::new();
    let mut free = (a, b);
    if a == b && !(is_all(low, b'0') && is_all(high, b'9')) {
        return format!("[{}] {}", char::from(a), group(&digits(low, high)));
    }
    if !is_all(low, b'0') {
        parts.push(format!("[{}] {}", char::from(a), group(&digits(low, &vec![b'9'; n]))));
        free.0 += 1;
    }
    if !is_all(high, b'9') {
        free.1 -= 1;
    }
    if free.0 <= free.1 {
        let mut part = format!("[{}-{}]", char::from(free.0), char::from(free.1));
        if n > 0 {
            // Writing to a string does not fail.
            let _ = write!(part, " [0-9]{{{n}}}");
        }
        parts.push(part);
    }
    if !is_all(high, b'9') {
        parts.push(format!("[{}] {}", char::from(b), group(&digits(&vec![b'0'; n], high))));
    }
    parts.join(" | ")
}

fn group(rule: &str) -> String {
    if rule.contains('|') { format!("({rule})") } else { rule.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::{super::matcher::allows, *};

    #[test]
    fn bounds_beyond_all_numbers_are_taken() {
        let read = |schema: Value| of_schema(schema.as_object().expect("a schema"), "x").map_err(|error| error.message);
        assert_eq!(read(json!({"minimum": -1e300, "maximum": 1e300})), Ok(Some((-MOST, MOST))));
        assert_eq!(read(json!({"exclusiveMinimum": 0.5, "exclusiveMaximum": 2.5})), Ok(Some((1, 2))));
        assert_eq!(read(json!({"minimum": 0.5, "maximum": 2.5})), Ok(Some((1, 2))));
        assert_eq!(read(json!({"type": "integer"})), Ok(None));
        // Symptom: the largest number that a grammar writes was allowed, which is less than the minimum; later the bound was
        // refused as one that leaves no integer.
        for (schema, what) in [
            (json!({"exclusiveMinimum": 1e300}), "exclusiveMinimum is 1e300"),
            (json!({"minimum": 1e300}), "minimum is 1e300"),
            (json!({"maximum": -1e300}), "maximum is -1e300"),
            (json!({"exclusiveMaximum": -MOST}), "exclusiveMaximum is -9.007199254740991e15"),
        ] {
            let why = format!("x.{what}: bounds beyond +-9007199254740991 are not supported");
            assert_eq!(read(schema), Err(why));
        }
        assert_eq!(
            read(json!({"minimum": 9e15, "maximum": 0.00001})),
            Err("x.maximum leaves no integer: the least is 9e15, the greatest 0".to_owned())
        );
        assert!(span(-MOST, MOST).len() < 4000);
    }

    #[test]
    fn small_spans_are_what_they_say() {
        assert_eq!(span(1, 3), "([1-3])");
        assert_eq!(span(0, 120), "([0-9] | [1-9] [0-9]{1} | [1] ([0-1] [0-9]{1} | [2] [0-0]))");
        assert_eq!(span(-2, 0), "(\"-\" ([1-2]) | [0-0])");
        for (low, high) in [(0, 0), (7, 7), (-30, 130), (98, 1002), (-1005, -990), (0, 9), (10, 99)] {
            let rule = span(low, high);
            for n in -2000..2000 {
                assert_eq!(allows(&rule, &n.to_string()), (low..=high).contains(&n), "{n} of {low} to {high}: {rule}");
            }
            assert!(!allows(&rule, "-0") && !allows(&rule, "007") && !allows(&rule, ""));
        }
    }

    proptest! {
        #[test]
        fn a_span_allows_its_numbers_alone(a in -MOST..=MOST, b in -MOST..=MOST, c in -MOST..=MOST, small in -300i64..300) {
            let (low, high) = (a.min(b), a.max(b));
            let rule = span(low, high);
            prop_assert!(rule.len() < 4000, "{}", rule.len());
            for n in [a, b, c, small, low.saturating_sub(1), high.saturating_add(1), low + 1, high - 1] {
                prop_assert_eq!(allows(&rule, &n.to_string()), (low..=high).contains(&n), "{} of {} to {}", n, low, high);
            }
        }
    }
}
