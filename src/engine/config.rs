use std::{path::PathBuf, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{
        EngineError, PrefixBudget, WorkerList,
        placement::{MAX_WORKERS, overlap},
    },
    refit::RefitConfig,
    route::{PolicyKind, StepTime},
    schedule::DispatchLimits,
    types::shown,
};

/// Where flash attention is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlashAttention {
    /// Off when every worker is on a CPU, where it makes results depend on the batch; on otherwise.
    #[default]
    Auto,
    /// Everywhere.
    On,
    /// Nowhere.
    Off,
}

impl FromStr for FlashAttention {
    type Err = EngineError;

    fn from_str(word: &str) -> Result<Self, EngineError> {
        match word {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(EngineError::Config(format!("'{}' is not auto, on or off; write one of them", shown(word)))),
        }
    }
}

/// What keys and values are stored as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvFormat {
    /// 16-bit floats.
    #[default]
    F16,
    /// 8-bit blocks; needs flash attention.
    Q8_0,
    /// 32-bit floats.
    F32,
}

impl FromStr for KvFormat {
    type Err = EngineError;

    fn from_str(name: &str) -> Result<Self, EngineError> {
        match name {
            "f16" => Ok(Self::F16),
            "q8_0" => Ok(Self::Q8_0),
            "f32" => Ok(Self::F32),
            _ => Err(EngineError::Config(format!("'{}' is not f16, q8_0 or f32; write one of them", shown(name)))),
        }
    }
}

/// How a model is served. The default is one prefill and two decode workers on the best device.
///
/// ```
/// use eldr::{
///     EngineConfig, PolicyKind,
///     engine::{FlashAttention, KvFormat, PrefixBudget},
/// };
///
/// let config = EngineConfig {
///     decode: "8@cpu".parse()?,
///     flash_attention: FlashAttention::On,
///     kv_format: KvFormat::Q8_0,
///     prefix_cache: PrefixBudget::MiB(512),
///     policy: PolicyKind::MarginalCost,
///     ..EngineConfig::default()
/// };
/// assert!(config.problems().is_empty());
/// # Ok::<(), eldr::EngineError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "switches of their own, each independent")]
pub struct EngineConfig {
    /// Prefill workers.
    pub prefill: WorkerList,
    /// Decode workers.
    pub decode: WorkerList,
    /// Sequences a worker holds.
    pub n_slots: u32,
    /// Tokens of a sequence, prompt and output together; cut to what the model was trained with.
    pub n_ctx_slot: u32,
    /// Prompt tokens a prefill step runs.
    pub chunk: u32,
    /// Threads of each CPU worker; 0 divides the cores among them.
    pub n_threads: u32,
    /// Flash attention.
    pub flash_attention: FlashAttention,
    /// Make a text independent of the worker, the policy and the batch, to the bit, on the CPU without flash
    /// attention, or with it on one thread a worker. A step of one sequence then reads the experts of a second token.
    pub exact: bool,
    /// Type of keys and values.
    pub kv_format: KvFormat,
    /// Layers on the device; none is all of them.
    pub n_gpu_layers: Option<u32>,
    /// Keep the experts of all layers in host memory.
    pub cpu_moe: bool,
    /// Keep the experts of the first so many layers in host memory.
    pub n_cpu_moe: u32,
    /// What prefill workers keep of finished prompts, each, for prompts that begin alike.
    pub prefix_cache: PrefixBudget,
    /// MiB of host memory for prefixes that had to make room in the prefill workers' slots; 0 is none.
    pub cache_ram_mib: u64,
    /// The longest an RPC server may keep a byte waiting before its workers are lost.
    pub rpc_deadline: Duration,
    /// A folder for such prefixes, which outlive the process there; none is none.
    pub cache_dir: Option<PathBuf>,
    /// MiB of prefixes there at most.
    pub cache_disk_mib: u64,
    /// What a finished request leaves on its decode worker, prompt and answer, goes back to the prefix cache. Decode steps
    /// are tapped then, if picks are counted.
    pub cache_answers: bool,
    /// Files with texts that prompts begin with, such as system prompts, which the prefix cache never drops.
    pub pins: Vec<PathBuf>,
    /// Keep keys and values of the whole sequence in layers with a sliding window, so that a prefix can be used again
    /// wherever it ends.
    pub swa_full: bool,
    /// Map the model file instead of reading it.
    pub use_mmap: bool,
    /// Let ggml use repacked weights and AMX; off because some virtual machines report AMX that faults.
    pub extra_bufts: bool,
    /// How decode workers are chosen.
    pub policy: PolicyKind,
    /// A calibration file, for policies that compare signatures.
    pub calibration: Option<PathBuf>,
    /// Route by load where the calibration says that locality does not help; false if a policy was asked for by name.
    pub heed_verdict: bool,
    /// Width of the locality band; none takes the calibration's.
    pub tau: Option<f32>,
    /// Fewest workers of the locality band.
    pub min_band: u32,
    /// Fit the centroids to the traffic while serving; none leaves them as calibrated.
    pub refit: Option<RefitConfig>,
    /// One decode step in so many is tapped and tells the marginal cost what its sequences really pick; none is if 0.
    pub feedback: u32,
    /// What decode steps take, for the marginal cost to begin with; none lets it learn that from the first steps on.
    pub step_time: Option<StepTime>,
    /// Seed of the policies that draw.
    pub seed: u64,
    /// The workload's domains, for the `domain` oracle.
    pub domains: Vec<String>,
    /// Bounds of the queues.
    pub limits: DispatchLimits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            prefill: WorkerList::best(1),
            decode: WorkerList::best(2),
            n_slots: 16,
            n_ctx_slot: 2048,
            chunk: 512,
            n_threads: 0,
            flash_attention: FlashAttention::Auto,
            exact: false,
            kv_format: KvFormat::F16,
            n_gpu_layers: None,
            cpu_moe: false,
            n_cpu_moe: 0,
            prefix_cache: PrefixBudget::Slots,
            cache_ram_mib: 0,
            rpc_deadline: Duration::from_secs(30),
            cache_dir: None,
            cache_disk_mib: 4096,
            cache_answers: false,
            pins: Vec::new(),
            swa_full: false,
            use_mmap: true,
            extra_bufts: false,
            policy: PolicyKind::Auto,
            calibration: None,
            heed_verdict: true,
            tau: None,
            min_band: 1,
            refit: None,
            feedback: 0,
            step_time: None,
            seed: 0,
            domains: Vec::new(),
            limits: DispatchLimits::default(),
        }
    }
}

/// More than any machine holds: a pebibyte.
const MOST_MIB: u64 = 1 << 30;
const MOST_HANDOFFS: usize = 1 << 20;

impl EngineConfig {
    /// Every number that can not work, each in a sentence; nothing if all can.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut rule = |holds: bool, why: &str| {
            if !holds {
                problems.push(why.to_owned());
            }
        };
        rule(self.prefill.n_workers() > 0, "there are zero prefill workers; ask for at least one");
        rule(self.decode.n_workers() > 0, "there are zero decode workers; ask for at least one");
        for (kind, workers) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            let n = workers.n_workers();
            rule(n <= MAX_WORKERS as usize, &format!("there are {n} {kind} workers; ask for at most {MAX_WORKERS}"));
        }
        let most = 256 - u32::from(self.exact);
        rule(
            (1..=most).contains(&self.n_slots),
            &format!(
                "slots must be between 1 and {most}, not {}: llama.cpp holds 256 sequences a context{}",
                self.n_slots,
                if self.exact { ", and an exact run keeps one free" } else { "" }
            ),
        );
        rule(self.n_ctx_slot >= 2, "the context of a slot must be at least 2 tokens");
        rule(self.chunk > 0, "the prefill chunk must be at least 1 token");
        rule(self.tau.is_none_or(|tau| (0.0..=2.0).contains(&tau)), "tau must be between 0 and 2");
        rule(self.min_band > 0, "the locality band must be at least 1 worker wide");
        rule(self.limits.age_bound > 0, "the age bound must be at least 1, which is everybody in turn");
        rule(self.limits.max_queue > 0, "the queue must hold at least 1 request");
        rule(self.limits.max_prefill > 0, "a prefill worker must be given at least 1 request at a time");
        rule(
            self.limits.max_handoffs <= MOST_HANDOFFS,
            &format!("hand-offs that wait must be at most {MOST_HANDOFFS}: each holds its keys and values in memory"),
        );
        for (what, mib) in [("memory", self.cache_ram_mib), ("disk", self.cache_disk_mib)] {
            rule(mib <= MOST_MIB, &format!("cache {what} must be at most {MOST_MIB} MiB, not {mib}"));
        }
        let deadline = (1..=3600).contains(&self.rpc_deadline.as_secs());
        rule(deadline, "the deadline of RPC servers must be between 1 and 3600 seconds");
        let keeps = self.prefix_cache != PrefixBudget::Off;
        let asked = self.cache_ram_mib > 0 || self.cache_dir.is_some() || !self.pins.is_empty() || self.cache_answers;
        rule(
            keeps || !asked,
            "cache memory, a cache folder, pins and answers need the prefix cache, which is off; switch it on",
        );
        rule(
            self.cache_dir.is_none() || self.cache_disk_mib > 0,
            "the cache folder is bounded to 0 MiB, where no prefix fits: give it at least 1, or leave the folder out",
        );
        rule(
            !(self.exact && self.cache_answers),
            "an exact run can not use answers again: a token computed alone and one computed with a prompt differ in the \
             last bits; leave the answers or the exactness out",
        );
        problems.extend(overlap(&self.prefill, &self.decode));
        let mut rule = |holds: bool, why: &str| {
            if !holds {
                problems.push(why.to_owned());
            }
        };
        let quantised = self.kv_format == KvFormat::Q8_0 && self.flash_attention != FlashAttention::On;
        rule(!quantised, "q8_0 keys and values need flash attention: switch it on for all workers");
        if let Some(refit) = &self.refit {
            let moves = self.policy.uses_centroids();
            rule(
                moves,
                "a refit moves centroids, which the policy does not use: route by marginal_cost or locality_band, or do not refit",
            );
            problems.extend(refit.problems(self.decode.n_workers()));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_has_no_problems_and_every_wrong_number_is_named() {
        assert!(EngineConfig::default().problems().is_empty());
        let wrong = EngineConfig { n_slots: 0, chunk: 0, tau: Some(f32::NAN), ..EngineConfig::default() };
        assert_eq!(wrong.problems().len(), 3);
        let refit = |policy| EngineConfig { policy, refit: Some(RefitConfig::default()), ..EngineConfig::default() };
        assert!(refit(PolicyKind::LocalityBand).problems().is_empty());
        assert!(refit(PolicyKind::RoundRobin).problems()[0].contains("route by marginal_cost or locality_band"));
        let short = RefitConfig { max_signatures: 3, ..RefitConfig::default() };
        let wrong = EngineConfig { refit: Some(short), ..refit(PolicyKind::LocalityBand) };
        assert!(wrong.problems()[0].contains("keeps 3 signatures"), "{:?}", wrong.problems());
    }

    // Symptom: 2^44 MiB of cache memory were none, since their bytes passed 64 bits.
    #[test]
    fn what_no_machine_holds_is_refused() {
        let mut wrong = EngineConfig { cache_ram_mib: 1 << 44, cache_disk_mib: u64::MAX, ..EngineConfig::default() };
        wrong.limits.max_handoffs = usize::MAX;
        let problems = wrong.problems();
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(
            problems[1].contains("cache memory must be at most 1073741824 MiB, not 17592186044416"),
            "{problems:?}"
        );
    }

    // Symptom: a folder of 0 MiB was taken, and every prefix was thrown away without a word.
    #[test]
    fn a_cache_folder_without_room_is_refused() {
        let none = EngineConfig { cache_disk_mib: 0, ..EngineConfig::default() };
        assert!(none.problems().is_empty(), "without a folder it bounds nothing");
        let wrong = EngineConfig { cache_dir: Some("prefixes".into()), ..none };
        assert!(wrong.problems()[0].contains("bounded to 0 MiB"), "{:?}", wrong.problems());
    }
}
