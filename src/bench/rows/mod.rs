//! Measured rows: what was set, what came out; the tables and charts of `eldr report` are drawn from these alone.
//!
//! Never measures anything, and never fills in a number that a row does not have.

mod chart;
mod check;
mod group;
mod growth;
mod markdown;
mod of_report;
mod page;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Environment;

pub use chart::svg;
pub use growth::{Exponent, exponents};
pub use markdown::markdown;
pub use of_report::rows_of;
pub use page::page;

/// The version of the format.
pub const ROWS_VERSION: u32 = 1;

/// A file of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// [`ROWS_VERSION`].
    pub version: u32,
    /// Where they were measured; null for what no machine changes.
    #[serde(default)]
    pub environment: Option<Environment>,
    /// What a reader must know to judge the numbers, one sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The rows, in order of measurement.
    pub rows: Vec<Row>,
}

/// As it is read, before its rows are looked at.
#[derive(Deserialize)]
struct File {
    version: u32,
    #[serde(default)]
    environment: Option<Environment>,
    #[serde(default)]
    notes: Vec<String>,
    rows: Vec<Value>,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What measured it: `simulate`, `bench`, `growth`.
    pub verb: String,
    /// What was set, by name. Rows that differ in `seed` or `repeat` alone are repeats of one measurement.
    pub setting: BTreeMap<String, Value>,
    /// What came out, by name; the unit is the name's end.
    pub measured: BTreeMap<String, f64>,
}

/// Why rows can not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowsError {
    /// Not the JSON of rows.
    #[error("not rows of eldr ({0}): write them with `eldr simulate -o` or `eldr bench --rows`")]
    Format(#[from] serde_json::Error),
    /// Another version.
    #[error("rows of version {found}, and this eldr reads version {ROWS_VERSION}: measure them again")]
    Version {
        /// The file's.
        found: u32,
    },
    /// A row that no measurement gives.
    #[error("row {row}: {why}")]
    Row {
        /// Which, from 1.
        row: usize,
        /// The field, and why it can not be.
        why: String,
    },
    /// Nothing to show.
    #[error("there are no rows in it: measure something")]
    Empty,
}

impl Rows {
    /// Reads what [`Rows::to_json`] wrote; a row that says what can not be is refused.
    pub fn from_json(text: &str) -> Result<Self, RowsError> {
        let File { version, environment, notes, rows } = serde_json::from_str(text)?;
        if version != ROWS_VERSION {
            return Err(RowsError::Version { found: version });
        }
        if rows.is_empty() {
            return Err(RowsError::Empty);
        }
        let rows = rows.into_iter().enumerate().map(|(at, row)| check::read(at + 1, row)).collect::<Result<_, _>>()?;
        Ok(Self { version, environment, notes, rows })
    }

    /// One row a line, so that files can be compared and cut.
    pub fn to_json(&self) -> String {
        let line = |row: &Row| serde_json::to_string(row).unwrap_or_default();
        let rows: Vec<String> = self.rows.iter().map(line).collect();
        let head = |value: Result<String, serde_json::Error>| value.unwrap_or_else(|_| "null".to_owned());
        format!(
            "{{\"version\":{},\n\"environment\":{},\n\"notes\":{},\n\"rows\":[\n{}\n]}}\n",
            self.version,
            head(serde_json::to_string(&self.environment)),
            head(serde_json::to_string(&self.notes)),
            rows.join(",\n")
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// Two policies at two rates, three seeds each.
    pub fn sample() -> Rows {
        let mut rows = Vec::new();
        for (rate, slow) in [(1.0, 1.0), (2.0, 1.5)] {
            for (policy, fast) in [("round_robin", 1.0), ("locality_band", 0.9)] {
                for seed in 0..3 {
                    let setting = [
                        ("policy", json!(policy)),
                        ("rate", json!(rate)),
                        ("seed", json!(seed)),
                        ("workers", json!(8)),
                    ];
                    let tpot = 20.0 * slow * fast + f64::from(seed - 1);
                    let measured =
                        [("tpot_p50_ms", tpot), ("tpot_p99_ms", 2.0 * tpot), ("experts_per_token", 2.25 * fast)];
                    rows.push(Row {
                        verb: "simulate".into(),
                        setting: setting.map(|(name, value)| (name.to_owned(), value)).into(),
                        measured: measured.map(|(name, value)| (name.to_owned(), value)).into(),
                    });
                }
            }
        }
        Rows { version: ROWS_VERSION, environment: None, notes: vec!["Costs are estimates.".into()], rows }
    }

    #[test]
    fn rows_come_back_from_their_json() {
        let rows = sample();
        let text = rows.to_json();
        assert_eq!(text.lines().count(), 4 + 12 + 1);
        assert_eq!(Rows::from_json(&text).expect("its own JSON"), rows);
    }

    #[test]
    fn what_is_not_rows_is_refused_in_words() {
        let message = |text: &str| Rows::from_json(text).expect_err("no rows").to_string();
        assert!(message("{}").contains("not rows of eldr"));
        assert!(message("{\"version\":9,\"rows\":[]}").contains("version 9"));
        assert!(message("{\"version\":1,\"rows\":[]}").contains("no rows"));
    }
}
