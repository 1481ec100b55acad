//! Rows as Markdown tables.
//!
//! Never rounds in a policy's favour: three digits count.

use std::fmt::Write as _;

use super::{
    Rows,
    group::{Group, constant, groups, varying},
    growth::exponents,
};

/// What is shown first, and how it is called.
const NAMES: [(&str, &str); 16] = [
    ("tpot_p50_ms", "TPOT p50, ms"),
    ("tpot_p99_ms", "TPOT p99, ms"),
    ("ttft_p50_ms", "TTFT p50, ms"),
    ("ttft_p99_ms", "TTFT p99, ms"),
    ("experts_per_step", "experts a step"),
    ("experts_per_token", "experts read a token"),
    ("batch", "sequences a step"),
    ("tokens_per_s", "tokens/s"),
    ("gb_per_s", "read, GB/s"),
    ("bandwidth_share", "of the bandwidth"),
    ("step_ms", "step, ms"),
    ("busy", "busy"),
    ("imbalance", "busiest / mean"),
    ("cached", "prompt tokens kept"),
    ("finished", "finished"),
    ("retried", "retried"),
];
/// What is compared with the best load balancer.
const COMPARED: [(&str, &str); 2] = [("tpot_p50_ms", "p50"), ("tpot_p99_ms", "p99")];

/// The name of a measure in words.
pub(super) fn called(name: &str) -> &str {
    NAMES.iter().find(|(known, _)| *known == name).map_or(name, |(_, words)| words)
}

/// A section for each verb: the settings that are the same everywhere, a table of the others and of what came out. With
/// repeats a cell is the mean and its 95% interval.
pub fn markdown(rows: &Rows) -> String {
    let all = groups(rows);
    let mut text = String::new();
    let mut verbs: Vec<&str> = all.iter().map(|group| group.verb.as_str()).collect();
    verbs.dedup();
    for verb in verbs {
        let own: Vec<&Group> = all.iter().filter(|group| group.verb == verb).collect();
        text.push_str(&section(verb, &own, &all));
    }
    let growth = exponents(rows);
    if !growth.is_empty() {
        text.push_str("| cost | grows with | exponent | sizes |\n| --- | --- | --- | --- |\n");
        for one in growth {
            let (least, most) = (one.points[0].0, one.points[one.n - 1].0);
            let _ =
                writeln!(text, "| {} | {} | {:.2} | {least} to {most} |", cell(&one.what), cell(&one.by), one.exponent);
        }
        text.push('\n');
    }
    for note in &rows.notes {
        let _ = writeln!(text, "- {note}");
    }
    if let Some(environment) = &rows.environment {
        let _ = writeln!(text, "- {}", environment.sentence());
    }
    text
}

fn section(verb: &str, own: &[&Group], all: &[Group]) -> String {
    let constant: Vec<String> = constant(own).into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    let mut text = format!("### {verb}\n\n");
    if !constant.is_empty() {
        let _ = writeln!(text, "{}\n", cell(&constant.join(", ")));
    }
    let settings = varying(own);
    let known = NAMES.iter().map(|(name, _)| (*name).to_owned());
    let mut measures: Vec<String> =
        known.filter(|name| own.iter().any(|group| group.samples.contains_key(name))).collect();
    if measures.is_empty() {
        measures = own.first().map(|group| group.samples.keys().cloned().collect()).unwrap_or_default();
    }
    let is_same = |name: &String| {
        let mean = |group: &&Group| group.measured(name).map(|(mean, _)| mean.to_bits());
        own.len() > 1 && own.iter().all(|group| mean(group) == mean(&own[0]))
    };
    measures.retain(|name| !is_same(name));
    let compares = own.iter().any(|group| group.is_balancer()) && own.iter().any(|group| !group.is_balancer());
    let mut head: Vec<String> = settings.clone();
    head.extend(measures.iter().map(|name| called(name).to_owned()));
    if compares {
        head.extend(COMPARED.iter().map(|(_, what)| format!("{what} against the best balancer")));
    }
    let _ = writeln!(text, "| {} |\n|{}", head.join(" | "), " --- |".repeat(head.len()));
    for group in own {
        let mut cells: Vec<String> = settings.iter().map(|name| cell(&group.shown(name))).collect();
        cells.extend(measures.iter().map(|name| number(group.measured(name))));
        if compares {
            let change = |(name, _): &(&str, &str)| group.change(name, all).map_or("-".to_owned(), percent);
            cells.extend(COMPARED.iter().map(change));
        }
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text.push('\n');
    text
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

fn number(measured: Option<(f64, Option<(f64, f64)>)>) -> String {
    match measured {
        None => "-".to_owned(),
        Some((mean, Some((low, high)))) if low < high => {
            format!("{} ({} to {})", digits(mean), digits(low), digits(high))
        }
        Some((mean, _)) => digits(mean),
    }
}

/// Three or four digits that count.
pub(super) fn digits(x: f64) -> String {
    let decimals = match x.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        size if size >= 0.01 || size == 0.0 => 3,
        _ => return format!("{x:.2e}"),
    };
    format!("{x:.decimals$}")
}

fn percent(share: f64) -> String {
    format!("{:+.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::{growth, tests::sample};

    #[test]
    fn a_table_has_a_line_for_each_setting() {
        let text = markdown(&sample());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(&lines[..3], ["### simulate", "", "workers 8"]);
        assert_eq!(
            lines[4],
            "| policy | rate | TPOT p50, ms | TPOT p99, ms | experts read a token | p50 against the best balancer | p99 \
             against the best balancer |"
        );
        assert_eq!(
            lines[6],
            "| round_robin | 1.0 | 20.0 (17.5 to 22.5) | 40.0 (35.0 to 45.0) | 2.25 | +0.0 % | +0.0 % |"
        );
        assert!(lines[9].ends_with("| 2.02 | -10.0 % | -10.0 % |"), "{}", lines[9]);
        assert!(text.ends_with("- Costs are estimates.\n"));
    }

    #[test]
    fn growth_is_told_as_exponents() {
        let text = markdown(&growth::tests::sample());
        assert!(text.contains("| routing | workers | 2.00 | 8 to 128 |"), "{text}");
    }

    #[test]
    fn digits_that_count() {
        assert_eq!([1234.5, 12.34, 1.234, 0.5, 0.0].map(digits), ["1234", "12.3", "1.23", "0.500", "0.000"]);
        assert_eq!(digits(0.000_012_3), "1.23e-5");
    }
}
