//! What a reader of the table must know beside its numbers.
//!
//! Never changes a number.

use std::fmt::Write as _;

use super::Bench;
use crate::{
    bench::{Clock, Stopwatch},
    metrics::RunSummary,
    refit::{Reads, RefitStats},
    route::PolicyKind,
};

/// A mean batch below this has no company to route for.
const FEW: f64 = 2.0;

impl Bench<'_> {
    /// A sentence or two each.
    pub(super) fn notes(&self, runs: &[RunSummary]) -> Vec<String> {
        let is_virtual = self.params.clock == Clock::Virtual;
        let mut notes = Vec::new();
        if is_virtual {
            notes.extend(self.clock_notes().into_iter().map(str::to_owned));
        }
        if self.model.is_inflated() {
            notes.push(
                "The model is inflated: zero rows make its experts larger, its outputs are unchanged.".to_owned(),
            );
        }
        if self.keeps_prefixes() {
            notes.extend(self.caches.iter().map(|(policy, cache)| {
                let returned = self.config.cache_answers.then(|| format!(" {} answers came back.", cache.n_returned));
                format!(
                    "Prefix cache, {policy}: {} of {} prompt tokens were there ({} copies, {} fallbacks).{}",
                    cache.n_cached_tokens,
                    cache.n_prompt_tokens,
                    cache.n_copies,
                    cache.n_fallbacks,
                    returned.unwrap_or_default()
                )
            }));
        }
        notes.extend(self.refits.iter().map(|(policy, refit)| refit_note(*policy, refit, is_virtual)));
        let batches: Vec<f64> = runs.iter().filter_map(|run| Some(run.batch?.mean)).collect();
        let widest = batches.iter().copied().fold(0.0, f64::max);
        if !batches.is_empty() && widest < FEW {
            notes.push(format!(
                "A decode step held {widest:.1} sequences at most on average: with so few, routing has nothing to group. \
                 Offer more load (--concurrency, --rate) or add prefill workers."
            ));
        }
        notes
    }

    /// What the virtual clock is.
    fn clock_notes(&self) -> Vec<&'static str> {
        let prefills = if self.keeps_prefixes() {
            "Prefill steps were computed in every run, since what a worker keeps depends on what it ran before."
        } else {
            "Prefill steps were computed and timed once, first, and replayed under every policy."
        };
        if self.params.charge.is_some() {
            let charged = "Virtual clock: every step was really computed, and took what the given costs say, not what this \
                           machine takes for it.";
            return vec![charged];
        }
        let threads = (self.stopwatch() == Stopwatch::Thread).then_some(
            "Steps run on one CPU thread and were timed by its CPU time, which other programs on the machine do not \
             lengthen.",
        );
        [
            "Virtual clock: every step was really computed and timed alone on this machine; arrivals and hand-offs advance \
             on a virtual clock.",
            prefills,
        ]
        .into_iter()
        .chain(threads)
        .collect()
    }
}

fn refit_note(policy: PolicyKind, refit: &RefitStats, is_virtual: bool) -> String {
    let mut note = format!(
        "{policy}'s centroids followed the traffic: set anew {} times in {} checks.",
        refit.n_swaps, refit.n_checks
    );
    if let Some(Reads { distinct, batch }) = refit.reads {
        let _ = write!(note, " A step read {distinct:.1} experts a layer for {batch:.1} sequences");
        if let Some(Reads { distinct, batch }) = refit.expected_reads {
            let _ = write!(note, "; {distinct:.1} for {batch:.1} were expected");
        }
        note.push('.');
    }
    if is_virtual {
        note.push_str(" Fits take no time on the virtual clock: an engine runs them on a thread of their own.");
    }
    note
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
    use crate::metrics::RunMetrics;

    #[test]
    fn the_bytes_of_each_run_that_was_counted() {
        let mut runs = [(); 2].map(|()| RunMetrics::new(1).summarise(PolicyKind::RoundRobin, String::new()));
        runs[0].expert_bytes_step = Some(f64::from(18 << 20));
        assert_eq!(
            expert_note(&runs, 1, 2).expect("one was counted"),
            "Experts read a decode step, in MiB: round_robin 18.00; those of 1 of 2 MoE layers from host memory."
        );
        assert_eq!(expert_note(&runs[1..], 1, 2), None);
    }
}
