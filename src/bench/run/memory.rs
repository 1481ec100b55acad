//! What steps have to read, and how fast memory is.
//!
//! Never measures a device other than the CPU.

use super::Bench;
use crate::{
    bench::{StepBytes, Stopwatch, read_bandwidth},
    engine::{DeviceKind, devices, threads_alone},
};

impl Bench<'_> {
    /// What the model's steps read; nothing for a dense one, whose steps all read the same.
    pub(super) fn step_bytes(&self) -> Option<StepBytes> {
        let experts = self.model.facts().experts?;
        let kv_token = self.model.kv_bytes_per_token(self.config.kv_format);
        Some(StepBytes { expert: experts.expert, dense: experts.dense, kv_token })
    }

    /// Measures the read bandwidth of the cores that will compute, where those are CPU cores and there is a use for it.
    pub(super) fn measure_memory(&mut self) {
        let is_cpu = devices().iter().all(|device| device.kind == DeviceKind::Cpu);
        if !is_cpu || self.step_bytes().is_none() {
            return;
        }
        let n_threads = match (self.stopwatch(), self.config.n_threads) {
            (Stopwatch::Thread, _) => 1,
            (Stopwatch::Wall, 0) => threads_alone(),
            (Stopwatch::Wall | Stopwatch::Charged, n) => n,
        };
        self.environment.read_gb_per_s = Some(read_bandwidth(n_threads as usize));
    }
}
