//! Grammars of numbers with fractions between two bounds.
//!
//! Never writes an exponent: with one, whether a number is in bounds would not show in its digits one after another. Nor
//! more digits than keep it in bounds once it is read as a double.

use serde_json::{Map, Value};

use super::span::{self, MOST};
use crate::{server::error::ApiError, types::shown_number};

/// Decimals of so many digits are as many doubles, in the same order: none is read as another that is its bound.
const DIGITS: usize = 15;

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
    let bounds = span::bounds(map, path)?;
    let Some(last) = bounds.last().map(|bound| bound.path.clone()) else { return Ok(None) };
    let whole = bounds.iter().filter(|bound| !bound.is_far()).map(|bound| digits(bound.at.abs()).0).max();
    let n_whole = whole.unwrap_or(0).to_string().len();
    let left = DIGITS.saturating_sub(n_whole);
    // A number has one digit more, which tells it from its bound.
    let most = left.saturating_sub(1);
    for bound in bounds {
        let (at, path) = (bound.at, bound.path);
        if digits(at.abs()).1.len() > most {
            let beside = format!("beside bounds of {n_whole} before it");
            let why = format!(
                "{path} is {}, which has more than {most} digits behind the point, the most {beside}",
                shown_number(at)
            );
            return Err(ApiError::invalid(&path, why));
        }
        let end = if bound.is_low { &mut low } else { &mut high };
        let is_tighter = if bound.is_low { at > end.0 } else { at < end.0 };
        if is_tighter || (at.total_cmp(&end.0).is_eq() && !bound.inside) {
            *end = (at, bound.inside);
        }
    }
    range(low, high, left).map(Some).ok_or_else(|| {
        let [low, high] = [low.0, high.0].map(shown_number);
        ApiError::invalid(&last, format!("{last} leaves no number between {low} and {high}"))
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

/// The numbers from `low` to `high`, each with whether it is one of them, with at most `left` digits behind the point;
/// nothing if there are none.
fn range(low: (f64, bool), high: (f64, bool), left: usize) -> Option<String> {
    if low.0 > high.0 || (low.0 >= high.0 && !(low.1 && high.1)) {
        return None;
    }
    let mut parts = Vec::new();
    if low.0 < 0.0 {
        let nearest = if high.0 > 0.0 { (0.0, true) } else { high };
        parts.extend(positive(&end(nearest), &end(low), left).map(|rule| format!("\"-\" ({rule})")));
    }
    if high.0 > 0.0 || (high.0 >= 0.0 && high.1) {
        let nearest = if low.0 < 0.0 { (0.0, true) } else { low };
        parts.extend(positive(&end(nearest), &end(high), left));
    }
    (!parts.is_empty()).then(|| parts.join(" | "))
}

/// The numbers from `low` to `high`, which is no less.
fn positive(low: &End, high: &End, left: usize) -> Option<String> {
    let above = Some(Limit { digits: &low.fraction, inside: low.inside });
    let below = Some(Limit { digits: &high.fraction, inside: high.inside });
    let mut parts = Vec::new();
    let mut add = |whole: String, tail: &Tail| parts.extend(tail.behind(&whole, "\".\" "));
    if low.whole == high.whole {
        add(format!("\"{}\"", low.whole), &tail(above, below, left));
    } else {
        add(format!("\"{}\"", low.whole), &tail(above, None, left));
        if low.whole + 1 < high.whole {
            let between = span::span(low.whole.cast_signed() + 1, high.whole.cast_signed() - 1);
            add(between, &tail(None, None, left));
        }
        add(format!("\"{}\"", high.whole), &tail(None, below, left));
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
        (Some(low), None) if low.is_zero() => {
            (0..left).map(|zeros| format!("{}[1-9]{}", "[0] ".repeat(zeros), up_to(left - zeros - 1))).collect()
        }
        _ => by_first_digit(low, high, left - 1),
    };
    Tail { may_end, more }
}

/// At most `n` more digits.
fn up_to(n: usize) -> String {
    if n > 0 { format!(" [0-9]{{0,{n}}}") } else { String::new() }
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
        parts.push(format!("[{}-{}]{}", char::from(first), char::from(last), up_to(left)));
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
            json!({"minimum": 999_999_999_999_999_u64, "exclusiveMaximum": 999_999_999_999_999_u64}),
        ] {
            assert!(rule(&schema).is_err_and(|why| why.contains("leaves no number")), "{schema}");
        }
        assert_eq!(
            rule(&json!({"minimum": 2, "maximum": 1e-300})),
            Err("x.maximum is 1e-300, which has more than 13 digits behind the point, the most beside bounds of 1 before it".to_owned())
        );
        for (schema, most) in [
            (json!({"minimum": 0.300_000_000_000_000_04}), 13),
            (json!({"minimum": 0.125, "maximum": 123_456_789_012_u64}), 2),
            (json!({"minimum": 0.5, "maximum": 12_345_678_901_234_u64}), 0),
            (json!({"minimum": 0.5, "exclusiveMaximum": MOST}), 0),
        ] {
            let said = format!("more than {most} digits behind the point");
            assert!(rule(&schema).is_err_and(|why| why.contains(&said)), "{schema}");
        }
        // Symptom: it "leaves no number between 9007199254740992 and 9007199254740991".
        for (schema, what) in
            [(json!({"minimum": 1e300}), "minimum is 1e300"), (json!({"maximum": -1e17}), "maximum is -1e17")]
        {
            let why = format!("x.{what}: bounds beyond +-9007199254740991 are not supported");
            assert_eq!(rule(&schema), Err(why));
        }
        assert!(
            rule(&json!({"minimum": -1e300, "maximum": 1e300}))
                .is_ok_and(|rule| rule.is_some_and(|rule| rule.len() < 9000))
        );
    }

    // Symptom: the grammar of numbers below 1 allowed 0.999999999999999999, which is read as 1.0.
    #[test]
    fn what_is_allowed_is_inside_once_it_is_a_double() {
        for (schema, texts) in [
            (json!({"exclusiveMaximum": 1}), ["0.999999999999999999", "0.99999999999999", "0.999999999999999"]),
            (
                json!({"exclusiveMaximum": 1_000_000_000}),
                ["999999999.99999999999999999", "999999999.99999", "999999999.999999"],
            ),
            (json!({"exclusiveMinimum": 1}), ["1.0000000000000000900", "1.00000000000001", "1.000000000000001"]),
            (
                json!({"exclusiveMaximum": 900_719_925_474_099_u64}),
                ["900719925474098.9", "900719925474098", "900719925474099"],
            ),
        ] {
            let rule = rule(&schema).expect("a range").expect("bounded");
            assert_eq!(texts.map(|text| allows(&rule, text)), [false, true, false], "{schema}: {rule}");
        }
    }

    /// `number` with its last `n` digits behind the point.
    fn decimal(number: i128, n: usize) -> String {
        let digits = format!("{:0>1$}", number.unsigned_abs(), n + 1);
        let (whole, fraction) = digits.split_at(digits.len() - n);
        format!("{}{whole}{}{fraction}", if number < 0 { "-" } else { "" }, if n > 0 { "." } else { "" })
    }

    proptest! {
        #[test]
        fn a_double_is_where_its_digits_are(magnitude in 0u32..13, n_digits in 0usize..4, a in -1.0..1.0f64, b in -1.0..1.0f64,
                                            one_sided in any::<[bool; 2]>(), inside in any::<[bool; 2]>(),
                                            more in 0usize..16, off in -30i128..30) {
            let unit = 10f64.powi(magnitude.cast_signed());
            let [a, b] = [a.min(b), a.max(b)].map(|x| (x * unit) as i128);
            prop_assume!(a < b);
            let number = |units| decimal(units, n_digits).parse::<f64>().expect("a number");
            let (low, high) = (number(a), number(b));
            let mut schema = json!({});
            let mut whole = 0.0f64;
            for (side, name, at) in [(0, ["exclusiveMinimum", "minimum"], low), (1, ["exclusiveMaximum", "maximum"], high)] {
                if !one_sided[side] || one_sided == [true; 2] {
                    schema[name[usize::from(inside[side])]] = at.into();
                    whole = whole.max(at.abs().trunc());
                }
            }
            let left = DIGITS - whole.to_string().len();
            prop_assume!(left > n_digits);
            let rule = rule(&schema).expect("a range").expect("bounded");
            let scale = 10i128.pow(more as u32);
            let n_behind = n_digits + more;
            for units in [a * scale + off, b * scale + off, (a + b) * scale / 2 + off] {
                let text = decimal(units, n_behind);
                let x: f64 = text.parse().expect("a number");
                let above = |key, is_inside: &dyn Fn(f64, f64) -> bool| {
                    schema.get(key).and_then(Value::as_f64).is_none_or(|bound| is_inside(x, bound))
                };
                let holds = above("minimum", &|x, bound| x >= bound) && above("exclusiveMinimum", &|x, bound| x > bound)
                    && above("maximum", &|x, bound| x <= bound) && above("exclusiveMaximum", &|x, bound| x < bound);
                let want = holds && n_behind <= left;
                prop_assert_eq!(allows(&rule, &text), want, "{} of {}: {}", text, schema, rule);
            }
        }

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
