//! How long it takes until tokens come as fast as they will after workers were lost or joined.

use crate::clairvoyant::Seen;

/// Steps of every worker that are averaged.
const WINDOW: usize = 6;
/// Near enough to the rate it settles at.
const NEAR: f64 = 0.05;

/// For each change of the workers, decode steps of a worker until the time per token was within 5% of what it settled at:
/// its mean over the second half of the time until the next change, or the end.
pub fn recoveries(seen: &Seen) -> Vec<usize> {
    let ends = seen.changes.iter().skip(1).map(|change| change.0).chain([seen.steps.len()]);
    seen.changes.iter().zip(ends).map(|(&(from, n_workers), to)| recovery(&seen.steps[from..to], n_workers)).collect()
}

fn recovery(steps: &[(u32, f64)], n_workers: usize) -> usize {
    let per_token = |steps: &[(u32, f64)]| {
        let tokens: f64 = steps.iter().map(|step| f64::from(step.0)).sum();
        steps.iter().map(|step| f64::from(step.0) * step.1).sum::<f64>() / tokens.max(1.0)
    };
    let settled = per_token(&steps[steps.len() / 2..]);
    let size = WINDOW * n_workers.max(1);
    let windows = steps.chunks(size);
    let near = windows.into_iter().position(|window| (per_token(window) / settled - 1.0).abs() <= NEAR);
    near.unwrap_or(steps.len() / size) * WINDOW
}
