//! How many bytes of experts a decode step reads.
//!
//! Never measures: they are the distinct experts that were counted, times what one weighs.

use crate::metrics::RunSummary;

/// Fills in the bytes of each run, given what one expert of every layer weighs together.
pub(super) fn expert_bytes(runs: &mut [RunSummary], all_layers: u64) {
    for run in runs {
        run.expert_bytes_step = run.experts_distinct.map(|experts| experts.mean * all_layers as f64);
    }
}

/// The bytes of every run in a sentence; nothing if none was counted. `n_host` of the `n_layer` MoE layers keep their
/// experts in host memory.
pub(super) fn expert_note(runs: &[RunSummary], n_host: usize, n_layer: usize) -> Option<String> {
    let counted = runs.iter().filter_map(|run| Some((run.policy.as_str(), run.expert_bytes_step?)));
    let each: Vec<String> =
        counted.map(|(policy, bytes)| format!("{policy} {:.2}", bytes / f64::from(1 << 20))).collect();
    (!each.is_empty()).then(|| {
        format!(
            "Experts read a decode step, in MiB: {}; those of {n_host} of {n_layer} MoE layers from host memory.",
            each.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        metrics::{RunMetrics, StepRecord},
        route::PolicyKind,
        types::WorkerId,
    };

    #[test]
    fn distinct_experts_times_what_one_weighs() {
        let mut counted = RunMetrics::new(1);
        for n_distinct in [[4, 8], [6, 6]] {
            counted.stepped(StepRecord { worker: WorkerId(0), n_batch: 2, n_distinct: &n_distinct });
        }
        let mut runs = [counted, RunMetrics::new(1)].map(|run| run.summarise(PolicyKind::RoundRobin, String::new()));
        // Six experts a layer in the mean, of two layers whose experts weigh 1 MiB and 2 MiB.
        expert_bytes(&mut runs, 3 << 20);
        assert_eq!(runs[0].expert_bytes_step.map(|bytes| bytes as u64), Some(18 << 20));
        assert_eq!(runs[1].expert_bytes_step, None);
        let note = expert_note(&runs, 1, 2).expect("one was counted");
        assert_eq!(
            note,
            "Experts read a decode step, in MiB: round_robin 18.00; those of 1 of 2 MoE layers from host memory."
        );
        assert_eq!(expert_note(&runs[1..], 1, 2), None);
    }
}
