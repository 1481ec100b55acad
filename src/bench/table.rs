//! The report as plain text for a terminal.
//!
//! Shows only what the report holds.

use std::fmt::Write as _;

use crate::{bench::BenchReport, metrics::RunSummary};

const HEADER: [&str; 14] = [
    "policy", "TTFT p50", "p99", "TPOT p50", "p99", "experts", "batch", "reads", "route us", "outputs", "TPOT p50",
    "p99", "experts", "reads",
];
/// Columns before the changes.
const N_MEASURED: usize = 10;

/// The report's runs as a table, a legend and the report's notes; ASCII, lines end with a line feed.
///
/// The last four columns are the change against the best load balancer; they are left out if none ran.
pub fn table(report: &BenchReport) -> String {
    let n_columns = if report.has_load_balancer() { HEADER.len() } else { N_MEASURED };
    let mut rows = vec![HEADER.map(str::to_owned).to_vec()];
    rows.extend(report.runs.iter().zip(report.changes()).map(|(run, change)| {
        let changes = [change.tpot_p50, change.tpot_p99, change.experts, change.reads].map(percent);
        let [ttft, tpot] = [run.ttft_ms, run.tpot_ms].map(|times| (ms(times.map(|t| t.p50)), ms(times.map(|t| t.p99))));
        let measured = [
            run.policy.clone(),
            ttft.0,
            ttft.1,
            tpot.0,
            tpot.1,
            number(run.experts_distinct.map(|experts| experts.mean), 2),
            number(run.batch.map(|batch| batch.mean), 1),
            number(run.experts_per_token, 3),
            number(run.route_us.map(|us| us.p50), 1),
            outputs(report, run).to_owned(),
        ];
        measured.into_iter().chain(changes).collect::<Vec<_>>()
    }));
    let widths: Vec<usize> =
        (0..n_columns).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    if n_columns > N_MEASURED {
        let measured: usize = widths[..N_MEASURED].iter().map(|width| width + 2).sum();
        _ = writeln!(text, "{:measured$}| change from the best load balancer", "");
    }
    for row in &rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            _ = match column {
                0 => write!(text, "{cell:width$}"),
                N_MEASURED => write!(text, "  | {cell:>width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        text.push('\n');
    }
    text.push_str(&legend(report));
    text
}

/// What the columns mean, what failed, and the report's notes.
fn legend(report: &BenchReport) -> String {
    let mut text = String::from(
        "\nTTFT and TPOT in ms. experts: distinct experts a layer a step. batch: mean sequences a step. reads: \
         all experts read over all tokens, a layer;\nsmall batches pick fewer experts by themselves, but read more for a \
         token. route us: median decision. outputs: equal to the first row's, token for token.\n",
    );
    if report.has_load_balancer() {
        text.push_str("change: each number against the lowest that any load balancer reached for it.\n");
    }
    for run in report.runs.iter().filter(|run| run.failed > 0) {
        _ = writeln!(text, "{}: {} of {} requests failed.", run.policy, run.failed, run.requests + run.failed);
    }
    for note in &report.notes {
        _ = writeln!(text, "{note}");
    }
    text
}

fn outputs(report: &BenchReport, run: &RunSummary) -> &'static str {
    if report.outputs_equal(run) { "yes" } else { "no" }
}

fn ms(value: Option<f64>) -> String {
    number(value, if value.is_some_and(|value| value < 100.0) { 2 } else { 1 })
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

/// A share as a signed percentage with one decimal.
pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:+.1}%", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::sample;

    fn cells(line: &str) -> Vec<&str> {
        line.split_whitespace().filter(|&cell| cell != "|").collect()
    }

    #[test]
    fn rows_hold_the_numbers_in_aligned_columns() {
        let mut report = sample();
        report.runs[1].tokens_sha256 = "other".into();
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("| change from the best load balancer"));
        assert_eq!(
            cells(lines[7]),
            [
                "locality_band",
                "80.25",
                "310.5",
                "16.00",
                "27.00",
                "27.38",
                "15.5",
                "1.711",
                "8.5",
                "yes",
                "-20.0%",
                "-10.0%",
                "-25.0%",
                "-25.0%"
            ]
        );
        assert_eq!(cells(lines[3])[9], "no");
        assert!(lines[1..8].iter().all(|line| line.len() == lines[1].len()), "{text}");
        let bar = lines[0].find('|');
        assert!(lines[2..8].iter().all(|line| line.find('|') == bar), "{text}");
        assert!(text.is_ascii() && text.contains("The virtual clock times one step at a time."));
    }

    #[test]
    fn what_is_missing_is_a_dash_and_failures_are_told() {
        let mut report = sample();
        report.runs.drain(..4);
        report.runs[0].tpot_ms = None;
        report.runs[1].failed = 3;
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(cells(lines[0]).len(), 13, "no columns of changes: {text}");
        assert_eq!(cells(lines[1])[3..5], ["-", "-"]);
        assert!(text.contains("locality_band: 3 of 403 requests failed.") && !text.contains("load balancer"), "{text}");
    }
}
