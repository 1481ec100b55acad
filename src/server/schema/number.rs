//! Grammars of numbers with fractions between two bounds.
//!
//! Never writes an exponent: with one, whether a number is in bounds would not show in its digits one after another.

use serde_json::{Map, Value};

use super::span::{self, MOST};
use crate::server::error::ApiError;

/// Digits behind the point that a bound may have, and that a number has at most; one more tells it from its bound.
const BOUND_DIGITS: usize = 16;
const DIGITS: usize = BOUND_DIGITS + 1;

/// An end of a range of numbers that are not below 0.
#[derive(Debug, Clone)]
struct End {
    whole: u64,
    /// The digits behind the point, the last of them not 0.
    fraction: Vec<u8>,
    /// The end itself is in the range.
    inside: bool,
}

/// What stands in a rule for the numbers that the schema `map`, found at `path`, allows; none where it has no bounds.
pub(super) fn of_schema(map: &Map<String, Value>, path: &str) -> Result<Option<String>, ApiError> {
    let far = MOST as f64;
    let (mut low, mut high) = ((-far, true), (far, true));
    let mut last = None;
    for (name, bound, path) in span::bounds(map, path)? {
        let inside = !name.starts_with("exclusive");
        let is_low = name.ends_with("inimum");
        let end = if is_low { &mut low } else { &mut high };
        let is_tighter = if is_low { bound > end.0 } else { bound < end.0 };
        if is_tighter || (bound.total_cmp(&end.0).is_eq() && !inside) {
            *end = (bound, inside);
        }
        if digits(bound.abs()).1.len() > BOUND_DIGITS {
            let why = format!("{path} is {bound}, which has more than {BOUND_DIGITS} digits behind the point");
            return Err(ApiError::invalid(&path, why));
        }
        last = Some(path);
    }
    let Some(path) = last else { return Ok(None) };
    let rule = range(low, high);
    rule.map(Some).ok_or_else(|| {
        let why = format!("{path} leaves no number between {} and {}", low.0, high.0);
        ApiError::invalid(&path, why)
    })
}

/// The digits of a number, before and behind the point.
fn digits(number: f64) -> (u64, Vec<u8>) {
    let text = number.to_string();
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    // Bounds are within the whole numbers a double holds.
    (whole.parse().unwrap_or(u64::MAX), fraction.as_bytes().to_vec())
}

fn end((number, inside): (f64, bool)) -> End {
    let (whole, fraction) = digits(number.abs());
    End { whole, fraction, inside }
}

/// The numbers from `low` to `high`, each with whether it is one of them; nothing if there are none.
fn range(low: (f64, bool), high: (f64, bool)) -> Option<String> {
    if low.0 > high.0 || (low.0 >= high.0 && !(low.1 && high.1)) {
        return None;
    }
    let mut parts = Vec::new();
    if low.0 < 0.0 {
        let nearest = if high.0 > 0.0 { (0.0, true) } else { high };
        parts.extend(positive(&end(nearest), &end(low)).map(|rule| format!("\"-\" ({rule})")));
    }
    if high.0 > 0.0 || (high.0 >= 0.0 && high.1) {
        let nearest = if low.0 < 0.0 { (0.0, true) } else { low };
        parts.extend(positive(&end(nearest), &end(high)));
    }
    (!parts.is_empty()).then(|| parts.join(" | "))
}

/// The numbers from `low` to `high`, which is no less.
fn positive(low: &End, high: &End) -> Option<String> {
    let above = Some(Limit { digits: &low.fraction, inside: low.inside });
    let below = Some(Limit { digits: &high.fraction, inside: high.inside });
    let mut parts = Vec::new();
    let mut add = |whole: String, tail: &Tail| parts.extend(tail.behind(&whole, "\".\" "));
    if low.whole == high.whole {
        add(format!("\"{}\"", low.whole), &tail(above, below, DIGITS));
    } else {
        add(format!("\"{}\"", low.whole), &tail(above, None, DIGITS));
        if low.whole + 1 < high.whole {
            let between = span::span(low.whole.cast_signed() + 1, high.whole.cast_signed() - 1);
            add(between, &tail(None, None, DIGITS));
        }
        add(format!("\"{}\"", high.whole), &tail(None, below, DIGITS));
    }
    (!parts.is_empty()).then(|| parts.join(" | "))
}

/// A bound of digits that go on: those it has, and zeros.
#[derive(Debug, Clone, Copy)]
struct Limit<'a> {
    digits: &'a [u8],
    inside: bool,
}

impl Limit<'_> {
    fn first(self) -> u8 {
        self.digits.first().copied().unwrap_or(b'0')
    }

    fn rest(self) -> Self {
        Self { digits: self.digits.get(1..).unwrap_or_default(), ..self }
    }

    fn is_zero(self) -> bool {
        self.digits.iter().all(|&digit| digit == b'0')
    }
}

/// How digits may go on: not at all, or by one of the alternatives.
#[derive(Debug)]
struct Tail {
    may_end: bool,
    more: Vec<String>,
}

impl Tail {
    /// What stands for `before` with this behind it, `mark` between them; nothing where nothing fits.
    fn behind(&self, before: &str, mark: &str) -> Option<String> {
        match (self.more.as_slice(), self.may_end) {
            ([], false) => None,
            ([], true) => Some(before.to_owned()),
            (more, may_end) => {
                let optional = if may_end { "?" } else { "" };
                Some(format!("{before} ({mark}({})){optional}", more.join(" | ")))
            }
        }
    }
}

/// At most `left` digits that are no less than `low` and no more than `high`, where there are such limits.
fn tail(low: Option<Limit<'_>>, high: Option<Limit<'_>>, left: usize) -> Tail {
    // What is no less than 0 is not limited.
    let low = low.filter(|low| !(low.is_zero() && low.inside));
    let may_end = low.is_none() && high.is_none_or(|high| !high.is_zero() || high.inside);
    if left == 0 {
        return Tail { may_end, more: Vec::new() };
    }
    let more = match (low, high) {
        (None, None) => vec![format!("[0-9]{{1,{left}}}")],
        (None, Some(high)) if high.is_zero() => {
            if may_end {
                vec![format!("[0]{{1,{left}}}")]
            } else {
                Vec::new()
            }
        }
        (Some(low), None) if low.is_zero() => vec![format!("[0]{{0,{}}} [1-9] [0-9]{{0,{left}}}", left - 1)],
        _ => by_first_digit(low, high, left - 1),
    };
    Tail { may_end, more }
}

fn by_first_digit(low: Option<Limit<'_>>, high: Option<Limit<'_>>, left: usize) -> Vec<String> {
    let (a, b) = (low.map_or(b'0', Limit::first), high.map_or(b'9', Limit::first));
    let class = |digit: u8| format!("[{}]", char::from(digit));
    let (low_rest, high_rest) = (low.map(Limit::rest), high.map(Limit::rest));
    if a == b {
        return tail(low_rest, high_rest, left).behind(&class(a), "").into_iter().collect();
    }
    if a > b {
        return Vec::new();
    }
    let mut parts = Vec::new();
    let (mut first, mut last) = (a, b);
    if low.is_some() {
        parts.extend(tail(low_rest, None, left).behind(&class(a), ""));
        first += 1;
    }
    if high.is_some() {
        parts.extend(tail(None, high_rest, left).behind(&class(b), ""));
        last -= 1;
    }
    if first <= last {
        parts.push(format!("[{}-{}] [0-9]{{0,{left}}}", char::from(first), char::from(last)));
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::{super::matcher::allows, *};

    fn rule(schema: &Value) -> Result<Option<String>, String> {
        of_schema(schema.as_object().expect("a schema"), "x").map_err(|error| error.message)
    }

    #[test]
    fn what_is_in_bounds_is_allowed_and_nothing_else() {
        let share = rule(&json!({"minimum": 0, "maximum": 1})).expect("a range").expect("bounded");
        for text in ["0", "1", "0.5", "0.0", "1.0", "0.99999", "0.0001"] {
            assert!(allows(&share, text), "{text}: {share}");
        }
        for text in ["-0.1", "-1", "1.1", "2", "1.0001", "00", "01", "0.", ".5", "", "1e0", "-"] {
            assert!(!allows(&share, text), "{text}: {share}");
        }
        let above = rule(&json!({"exclusiveMinimum": 0})).expect("a range").expect("bounded");
        for (text, want) in [("0", false), ("0.0", false), ("0.001", true), ("3", true), ("12.75", true), ("-1", false)]
        {
            assert_eq!(allows(&above, text), want, "{text}: {above}");
        }
        let both = rule(&json!({"minimum": -1.5, "exclusiveMaximum": 20.25})).expect("a range").expect("bounded");
        for (text, want) in [
            ("-1.5", true),
            ("-1.50", true),
            ("-1.51", false),
            ("-0.3", true),
            ("-2", false),
            ("20.24", true),
            ("20.2", true),
            ("20.25", false),
            ("20.250", false),
            ("20.3", false),
            ("19.999", true),
            ("21", false),
            ("7", true),
        ] {
            assert_eq!(allows(&both, text), want, "{text}: {both}");
        }
    }

    #[test]
    fn bounds_that_leave_nothing_are_refused_by_the_last() {
        assert_eq!(rule(&json!({"type": "number"})), Ok(None));
        for schema in [
            json!({"minimum": 3, "maximum": 2.5}),
            json!({"minimum": 3, "exclusiveMaximum": 3}),
            json!({"minimum": 1e300}),
            json!({"maximum": -1e17}),
        ] {
            assert!(rule(&schema).is_err_and(|why| why.contains("leaves no number")), "{schema}");
        }
        assert_eq!(
            rule(&json!({"minimum": 0.300_000_000_000_000_04})),
            Err("x.minimum is 0.30000000000000004, which has more than 16 digits behind the point".to_owned())
        );
        assert!(
            rule(&json!({"minimum": -1e300, "maximum": 1e300}))
                .is_ok_and(|rule| rule.is_some_and(|rule| rule.len() < 9000))
        );
    }

    proptest! {
        #[test]
        fn a_range_allows_its_numbers_alone(a in -3000i32..3000, b in -3000i32..3000, inside in any::<[bool; 2]>(),
                                            scale in 0u32..4, c in -40_000i32..40_000) {
            let unit = 10f64.powi(scale.cast_signed());
            let (low, high) = (f64::from(a.min(b)) / unit, f64::from(a.max(b)) / unit);
            let names = [["exclusiveMinimum", "minimum"][usize::from(inside[0])], ["exclusiveMaximum", "maximum"][usize::from(inside[1])]];
            let schema = json!({names[0]: low, names[1]: high});
            let holds = |x: f64| (if inside[0] { x >= low } else { x > low }) && (if inside[1] { x <= high } else { x < high });
            match rule(&schema) {
                Ok(rule) => {
                    let rule = rule.expect("bounded");
                    prop_assert!(rule.len() < 9000, "{}", rule.len());
                    for x in [low, high, f64::from(c) / 10.0 / unit, 0.0, low.midpoint(high)] {
                        let texts = [format!("{x:.9}"), format!("{x:.5}"), format!("{x:.1}"), format!("{x:.0}")];
                        for text in texts {
                            let number: f64 = text.parse().expect("a number");
                            prop_assert_eq!(allows(&rule, &text), holds(number), "{} of {}: {}", text, schema, rule);
                        }
                    }
                }
                Err(why) => prop_assert!(a == b && inside != [true; 2], "{}: {}", schema, why),
            }
        }
    }
}
