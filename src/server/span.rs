use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::{error::ApiError, fields::wrong_kind};

/// What bounds an integer in a schema: at least, at most, above, below.
pub(super) const NAMES: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

/// The largest whole number that a bounded grammar writes: every one up to it is a double.
const MOST: i64 = (1 << 53) - 1;

/// The least and the greatest integer that the schema `map`, found at `path`, allows; none where it says neither.
pub(super) fn of_schema(map: &Map<String, Value>, path: &str) -> Result<Option<(i64, i64)>, ApiError> {
    let (mut low, mut high) = (-MOST, MOST);
    let mut last = None;
    for name in NAMES {
        let Some(value) = map.get(name) else { continue };
        let path = format!("{path}.{name}");
        let bound = value.as_f64().ok_or_else(|| wrong_kind(&path, "a number", value))?;
        // Nothing is beyond what a grammar writes.
        let bound = bound.clamp(-(MOST as f64), MOST as f64);
        match name {
            "minimum" => low = low.max(bound.ceil() as i64),
            "maximum" => high = high.min(bound.floor() as i64),
            "exclusiveMinimum" => low = low.max(bound.floor() as i64 + 1),
            _ => high = high.min(bound.ceil() as i64 - 1),
        }
        last = Some(path);
    }
    match last {
        Some(path) if low > high => {
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

    use super::*;

    /// Whether a rule of the kind made here allows `text`: sequences, alternatives, classes, repetitions and a sign.
    fn allows(rule: &str, text: &str) -> bool {
        ends(rule.trim(), text).contains(&"")
    }

    /// What can be left of `text` once `rule` has taken its part.
    fn ends<'a>(rule: &str, text: &'a str) -> Vec<&'a str> {
        split(rule, '|').iter().flat_map(|choice| sequence(choice.trim(), text)).collect()
    }

    fn sequence<'a>(rule: &str, text: &'a str) -> Vec<&'a str> {
        let mut left = vec![text];
        for item in split(rule, ' ').iter().map(|item| item.trim()).filter(|item| !item.is_empty()) {
            left = left.into_iter().flat_map(|text| one(item, text)).collect();
        }
        left
    }

    fn one<'a>(item: &str, text: &'a str) -> Vec<&'a str> {
        if let Some(inner) = item.strip_prefix('(') {
            return ends(inner.strip_suffix(')').expect("closed"), text);
        }
        if item == "\"-\"" {
            return text.strip_prefix('-').into_iter().collect();
        }
        let (class, n) = item
            .split_once('{')
            .map_or((item, 1), |(class, n)| (class, n.trim_end_matches('}').parse().expect("a number")));
        let class = class.trim_matches(['[', ']']);
        let (a, b) = class.split_once('-').unwrap_or((class, class));
        let fits = |digit: u8| a.as_bytes()[0] <= digit && digit <= b.as_bytes()[0];
        let bytes = text.as_bytes();
        (bytes.len() >= n && bytes[..n].iter().all(|&digit| fits(digit))).then(|| &text[n..]).into_iter().collect()
    }

    fn split(rule: &str, at: char) -> Vec<String> {
        let (mut parts, mut depth) = (vec![String::new()], 0);
        for c in rule.chars() {
            depth += i32::from(c == '(') - i32::from(c == ')');
            if c == at && depth == 0 {
                parts.push(String::new());
            } else {
                parts.last_mut().expect("one").push(c);
            }
        }
        parts
    }

    #[test]
    fn bounds_beyond_all_numbers_are_taken() {
        let read = |schema: Value| of_schema(schema.as_object().expect("a schema"), "x").map_err(|error| error.message);
        assert_eq!(read(json!({"minimum": -1e300, "maximum": 1e300})), Ok(Some((-MOST, MOST))));
        assert_eq!(read(json!({"exclusiveMinimum": 0.5, "exclusiveMaximum": 2.5})), Ok(Some((1, 2))));
        assert_eq!(read(json!({"minimum": 0.5, "maximum": 2.5})), Ok(Some((1, 2))));
        assert_eq!(read(json!({"type": "integer"})), Ok(None));
        assert!(read(json!({"exclusiveMinimum": 1e300})).is_err_and(|why| why.contains("leaves no integer")));
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
