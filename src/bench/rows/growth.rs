//! How a cost grows: the exponent of a power law.
//!
//! Never claims one for fewer than three sizes.

use super::{Rows, group::groups};

/// How a cost grows with a size: as size to the power of `exponent`.
#[derive(Debug, Clone, PartialEq)]
pub struct Exponent {
    /// What costs.
    pub what: String,
    /// The size that grows.
    pub by: String,
    /// The power, by least squares on logarithms.
    pub exponent: f64,
    /// Sizes measured.
    pub n: usize,
    /// Sizes and costs, ascending.
    pub points: Vec<(f64, f64)>,
}

/// The growth of every cost of the rows of verb `growth`: settings `what`, `by` and `n`, measured `us`.
pub fn exponents(rows: &Rows) -> Vec<Exponent> {
    let mut found: Vec<Exponent> = Vec::new();
    for group in groups(rows).iter().filter(|group| group.verb == "growth") {
        let (what, by) = (group.shown("what"), group.shown("by"));
        let (Some(n), Some((us, _))) =
            (group.setting.get("n").and_then(serde_json::Value::as_f64), group.measured("us"))
        else {
            continue;
        };
        let at = found.iter().position(|one| one.what == what && one.by == by).unwrap_or_else(|| {
            found.push(Exponent { what, by, exponent: f64::NAN, n: 0, points: Vec::new() });
            found.len() - 1
        });
        found[at].points.push((n, us));
    }
    for one in &mut found {
        one.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        one.n = one.points.len();
        one.exponent = slope(&one.points);
    }
    found.retain(|one| one.n >= 3 && one.exponent.is_finite());
    found
}

/// The slope of the line of least squares through the logarithms.
fn slope(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (x.ln(), y.ln())).collect();
    let n = logs.len() as f64;
    let (mx, my) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let over: f64 = logs.iter().map(|&(x, y)| (x - mx) * (y - my)).sum();
    over / logs.iter().map(|&(x, _)| (x - mx) * (x - mx)).sum::<f64>()
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;
    use crate::bench::rows::{ROWS_VERSION, Row};

    /// A cost that grows with the square, and one that was measured twice only.
    pub fn sample() -> Rows {
        let row = |what: &str, n: f64, us: f64| Row {
            verb: "growth".into(),
            setting: [("what", json!(what)), ("by", json!("workers")), ("n", json!(n))]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
            measured: [("us".to_owned(), us)].into(),
        };
        let mut rows: Vec<Row> = [32.0, 8.0, 128.0].map(|n| row("routing", n, 3.0 * n * n)).into();
        rows.extend([row("ledger", 8.0, 1.0), row("ledger", 16.0, 2.0)]);
        Rows { version: ROWS_VERSION, environment: None, notes: Vec::new(), rows }
    }

    #[test]
    fn a_square_has_exponent_two() {
        let found = exponents(&sample());
        assert_eq!((found.len(), found[0].what.as_str(), found[0].n), (1, "routing", 3));
        assert!((found[0].exponent - 2.0).abs() < 1e-9 && found[0].points[0].0 < found[0].points[1].0);
    }
}
