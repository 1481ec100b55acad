//! A bench report as rows.
//!
//! Never adds up: one row a policy.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Row;
use crate::{
    bench::{BenchReport, Clock},
    metrics::{RunSummary, Summary},
    route::PolicyKind,
};

/// One row for each policy of `report`; `setting` is what was set besides what a report says.
pub fn rows_of(report: &BenchReport, setting: &BTreeMap<String, Value>) -> Vec<Row> {
    report.runs.iter().map(|run| row(report, run, setting)).collect()
}

fn row(report: &BenchReport, run: &RunSummary, extra: &BTreeMap<String, Value>) -> Row {
    let clock = match report.clock {
        Clock::Real => "real",
        Clock::Virtual => "virtual",
    };
    let mut setting = BTreeMap::from([
        ("policy".to_owned(), json!(run.policy)),
        ("workers".to_owned(), json!(report.decode)),
        ("prefill".to_owned(), json!(report.prefill)),
        ("clock".to_owned(), json!(clock)),
        ("seed".to_owned(), json!(report.seed)),
    ]);
    setting.extend(report.rate.map(|rate| ("rate".to_owned(), json!(rate))));
    let tau = report.calibration.as_ref().filter(|_| run.policy == PolicyKind::LocalityBand.name());
    setting.extend(tau.map(|c| ("tau".to_owned(), json!(c.tau.to_string().parse::<f64>().unwrap_or_default()))));
    setting.extend(extra.iter().filter(|(name, _)| *name != "tau").map(|(name, value)| (name.clone(), value.clone())));
    let mut measured = BTreeMap::new();
    for (name, times) in [("ttft", run.ttft_ms), ("tpot", run.tpot_ms), ("itl", run.itl_ms)] {
        if let Some(Summary { p50, p99, mean }) = times {
            measured.insert(format!("{name}_p50_ms"), p50);
            measured.insert(format!("{name}_p99_ms"), p99);
            measured.insert(format!("{name}_mean_ms"), mean);
        }
    }
    let limit = report.limits.iter().find(|limit| limit.policy == run.policy);
    let numbers = [
        ("experts_per_step", run.experts_distinct.map(|experts| experts.mean)),
        ("experts_per_token", run.experts_per_token),
        ("batch", run.batch.map(|batch| batch.mean)),
        ("tokens_per_s", Some(run.output_tokens_per_s)),
        ("route_p50_us", run.route_us.map(|us| us.p50)),
        ("handoff_p50_ms", run.handoff_ms.map(|ms| ms.p50)),
        ("finished", Some(run.requests as f64)),
        ("failed", Some(run.failed as f64)),
        ("gb_per_s", limit.map(|limit| limit.gb_per_s)),
        ("bandwidth_share", limit.and_then(|limit| limit.share)),
        ("bytes_per_step", limit.map(|limit| limit.bytes_per_step)),
    ];
    measured.extend(numbers.into_iter().filter_map(|(name, x)| Some((name.to_owned(), x?))));
    Row { verb: "bench".to_owned(), setting, measured }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Limit, report::tests::sample};

    #[test]
    fn a_policy_is_a_row_with_what_was_measured() {
        let mut report = sample();
        let limit = Limit { policy: "locality_band".into(), bytes_per_step: 4e7, gb_per_s: 9.0, share: Some(0.75) };
        report.limits.push(limit);
        let extra = BTreeMap::from([("slots".to_owned(), json!(24)), ("repeat".to_owned(), json!(1))]);
        let rows = rows_of(&report, &extra);
        assert_eq!(rows.len(), report.runs.len());
        let ours = rows.iter().find(|row| row.setting["policy"] == "locality_band").expect("a row");
        assert_eq!(
            (&ours.setting["slots"], &ours.setting["repeat"], &ours.setting["clock"]),
            (&json!(24), &json!(1), &json!("virtual"))
        );
        let near = |name: &str, want: f64| assert!((ours.measured[name] - want).abs() < 1e-9, "{name}");
        near("tpot_p50_ms", 16.0);
        near("bandwidth_share", 0.75);
        assert!(!rows[0].measured.contains_key("gb_per_s"));
    }
}
