use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

use crate::schedule::StoredMatch;

/// How much of a new time counts: the mean of about the last ten.
const NEWEST: f64 = 0.1;

/// What it takes on this machine to compute a token, to put a stored byte into a worker and to read one from a disk, learnt
/// from the times it took. Shared by all prefill workers.
#[derive(Debug, Clone, Default)]
pub struct RestoreRates(Arc<Mutex<Rates>>);

#[derive(Debug, Default)]
struct Rates {
    /// Seconds a token.
    prefill: Option<f64>,
    /// Seconds a byte.
    import: Option<f64>,
    read: Option<f64>,
}

fn learn(rate: &mut Option<f64>, n: u64, took: Duration) {
    if n == 0 {
        return;
    }
    let new = took.as_secs_f64() / n as f64;
    *rate = Some(rate.map_or(new, |old| old + NEWEST * (new - old)));
}

impl RestoreRates {
    /// A chunk of `n` prompt tokens took so long.
    pub fn prefilled(&self, n: usize, took: Duration) {
        learn(&mut self.0.lock().prefill, n as u64, took);
    }

    /// Putting `n_bytes` into a worker took so long.
    pub fn imported(&self, n_bytes: usize, took: Duration) {
        learn(&mut self.0.lock().import, n_bytes as u64, took);
    }

    /// Reading `n_bytes` from the disk took so long.
    pub fn read(&self, n_bytes: u64, took: Duration) {
        learn(&mut self.0.lock().read, n_bytes, took);
    }

    /// Whether restoring a stored prefix, read from a disk first or not, takes less time than computing `n_saved` tokens;
    /// none while one of the rates is not known.
    pub fn is_faster(&self, found: &StoredMatch, from_disk: bool, n_saved: u32) -> Option<bool> {
        let Rates { prefill, import, read } = *self.0.lock();
        let byte = import? + if from_disk { read? } else { 0.0 };
        Some(byte * found.n_bytes as f64 <= prefill? * f64::from(n_saved))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_restored_only_where_that_is_faster_than_computing_it() {
        let rates = RestoreRates::default();
        let found = StoredMatch { id: 0, tier: 0, n_tokens: 100, n_common: 100, n_bytes: 100_000 };
        rates.prefilled(50, Duration::from_millis(50));
        assert_eq!(rates.is_faster(&found, false, 100), None, "nobody knows yet what a restore takes");
        rates.imported(1000, Duration::from_micros(500));
        // 50 ms to restore; 1 ms a token.
        assert_eq!(rates.is_faster(&found, false, 51), Some(true));
        assert_eq!(rates.is_faster(&found, false, 49), Some(false));
        assert_eq!(rates.is_faster(&found, true, 100), None);
        rates.read(1000, Duration::from_micros(400));
        assert_eq!(rates.is_faster(&found, true, 91), Some(true));
        assert_eq!(rates.is_faster(&found, true, 89), Some(false));
        // The disk gets slower, step by step.
        (0..100).for_each(|_| rates.read(1000, Duration::from_millis(1)));
        assert_eq!(rates.is_faster(&found, true, 140), Some(false));
        assert_eq!(rates.is_faster(&found, true, 151), Some(true));
        rates.read(0, Duration::from_secs(1));
        assert_eq!(rates.is_faster(&found, true, 151), Some(true), "nothing was read");
    }
}
