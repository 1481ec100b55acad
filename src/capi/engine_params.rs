use std::ffi::c_char;

use super::{
    Status,
    args::{self, FromC, Growing},
    failure::{Failure, guard_done},
};
use crate::{
    engine::{EngineConfig, FlashAttention, KvFormat},
    route::PolicyKind,
};

/// How a model is served. Fill it with eldr_engine_default_params() first. Strings are read before eldr_engine_open()
/// returns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EngineParams {
    /// sizeof(eldr_engine_params).
    pub size: usize,
    /// The GGUF file.
    pub model: *const c_char,
    /// The calibration file, for policies that compare signatures; may be NULL.
    pub calibration: *const c_char,
    /// The routing policy's name; NULL is `locality_band` with a calibration, unless that says it does not help, and
    /// `least_loaded` without.
    pub policy: *const c_char,
    /// Prefill workers such as `1` or `2@cuda:0`; NULL is one on the best device.
    pub prefill: *const c_char,
    /// Decode workers such as `8@cpu` or `2@cuda:0,2@cuda:1`; NULL is two on the best device.
    pub decode: *const c_char,
    /// Sequences a worker holds.
    pub n_slots: u32,
    /// Tokens of a sequence, prompt and output together.
    pub n_ctx_slot: u32,
    /// Prompt tokens a prefill step runs.
    pub chunk: u32,
    /// Threads of each CPU worker; 0 divides the cores among them.
    pub n_threads: u32,
    /// Layers on the device; below 0 all.
    pub n_gpu_layers: i32,
    /// Keep the experts of the first so many layers in host memory; below 0 of all.
    pub n_cpu_moe: i32,
    /// `auto`, `on` or `off`; NULL is `auto`.
    pub flash_attention: *const c_char,
    /// Type of keys and values: `f16`, `q8_0` or `f32`; NULL is `f16`.
    pub kv_format: *const c_char,
    /// Not 0: texts do not depend on worker, policy or batch, to the bit, on the CPU without flash attention.
    pub exact: u32,
    /// 0: read the model file instead of mapping it.
    pub use_mmap: u32,
    /// Width of the locality band; NaN is the calibration's.
    pub tau: f32,
    /// Fewest workers of the locality band.
    pub min_band: u32,
    /// Seed of the policies that draw.
    pub seed: u64,
    /// The workload's domains separated by commas, for the `domain` policy; may be NULL.
    pub domains: *const c_char,
    /// Requests that may wait; more are refused.
    pub max_queue: u32,
    /// 0 for now.
    pub reserved: u32,
}

// SAFETY: repr(C); numbers, and pointers that may be NULL.
unsafe impl FromC for EngineParams {}

impl Growing for EngineParams {
    const NAME: &'static str = "eldr_engine_params";
    const FIRST_SIZE: usize = 128;

    fn defaults() -> Self {
        let config = EngineConfig::default();
        let null = std::ptr::null();
        Self {
            size: size_of::<Self>(),
            model: null,
            calibration: null,
            policy: null,
            prefill: null,
            decode: null,
            n_slots: config.n_slots,
            n_ctx_slot: config.n_ctx_slot,
            chunk: config.chunk,
            n_threads: config.n_threads,
            n_gpu_layers: -1,
            n_cpu_moe: 0,
            flash_attention: null,
            kv_format: null,
            exact: u32::from(config.exact),
            use_mmap: u32::from(config.use_mmap),
            tau: f32::NAN,
            min_band: config.min_band,
            seed: config.seed,
            domains: null,
            max_queue: u32::try_from(config.limits.max_queue).unwrap_or(u32::MAX),
            reserved: 0,
        }
    }
}

/// Fills `params`, of `size` bytes (sizeof(eldr_engine_params)), with the defaults; the model is the host's. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_default_params(params: *mut EngineParams, size: usize) -> Status {
    // SAFETY: the caller passes a struct of `size` bytes.
    guard_done(|| unsafe { args::write_defaults(params, size, "params") })
}

impl EngineParams {
    /// The configuration, or every mistake in it.
    ///
    /// # Safety
    /// Its strings are NULL or terminated.
    pub(super) unsafe fn config(&self) -> Result<EngineConfig, Failure> {
        let text = |at: *const c_char, what: &str| {
            // SAFETY: passed on.
            unsafe { args::optional_text(at, what) }
        };
        let mut config = EngineConfig {
            n_slots: self.n_slots,
            n_ctx_slot: self.n_ctx_slot,
            chunk: self.chunk,
            n_threads: self.n_threads,
            n_gpu_layers: u32::try_from(self.n_gpu_layers).ok(),
            cpu_moe: self.n_cpu_moe < 0,
            n_cpu_moe: u32::try_from(self.n_cpu_moe).unwrap_or(0),
            exact: self.exact != 0,
            use_mmap: self.use_mmap != 0,
            tau: Some(self.tau).filter(|tau| !tau.is_nan()),
            min_band: self.min_band,
            seed: self.seed,
            // SAFETY: passed on.
            calibration: unsafe { args::optional_path(self.calibration, "calibration") }?,
            ..EngineConfig::default()
        };
        config.limits.max_queue = self.max_queue as usize;
        let mut problems = Vec::new();
        let mut note = |result: Result<(), String>| problems.extend(result.err());
        if let Some(list) = text(self.prefill, "prefill")? {
            note(list.parse().map(|list| config.prefill = list).map_err(|error| error.to_string()));
        }
        if let Some(list) = text(self.decode, "decode")? {
            note(list.parse().map(|list| config.decode = list).map_err(|error| error.to_string()));
        }
        let policy = text(self.policy, "policy")?;
        config.heed_verdict = policy.is_none();
        match policy {
            Some(name) => note(name.parse().map(|kind| config.policy = kind).map_err(|error| error.to_string())),
            None if config.calibration.is_some() => config.policy = PolicyKind::LocalityBand,
            None => {}
        }
        match text(self.flash_attention, "flash_attention")? {
            None | Some("auto") => {}
            Some("on") => config.flash_attention = FlashAttention::On,
            Some("off") => config.flash_attention = FlashAttention::Off,
            Some(other) => note(Err(format!("flash_attention is '{other}'; it can be auto, on or off"))),
        }
        match text(self.kv_format, "kv_format")? {
            None | Some("f16") => {}
            Some("q8_0") => config.kv_format = KvFormat::Q8_0,
            Some("f32") => config.kv_format = KvFormat::F32,
            Some(other) => note(Err(format!("kv_format is '{other}'; it can be f16, q8_0 or f32"))),
        }
        if let Some(list) = text(self.domains, "domains")? {
            config.domains = list.split(',').map(|name| name.trim().to_owned()).collect();
        }
        problems.extend(config.problems());
        if problems.is_empty() { Ok(config) } else { Err(Failure::new(Status::Config, problems.join("; "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(params: &EngineParams) -> Result<EngineConfig, Failure> {
        // SAFETY: the tests pass literals.
        unsafe { params.config() }
    }

    #[test]
    fn the_defaults_are_the_engine_s() {
        assert_eq!(config(&EngineParams::defaults()).expect("valid"), EngineConfig::default());
        let named = EngineParams { policy: c"least_loaded".as_ptr(), ..EngineParams::defaults() };
        assert!(!config(&named).expect("valid").heed_verdict, "a policy asked for by name is used");
        let calibrated = EngineParams { calibration: c"a.safetensors".as_ptr(), ..EngineParams::defaults() };
        assert_eq!(config(&calibrated).expect("valid").policy, PolicyKind::LocalityBand);
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let wrong = EngineParams {
            policy: c"fastest".as_ptr(),
            decode: c"none".as_ptr(),
            flash_attention: c"maybe".as_ptr(),
            n_slots: 0,
            ..EngineParams::defaults()
        };
        let failure = config(&wrong).expect_err("four mistakes");
        let text = format!("{failure:?}");
        for part in ["unknown policy 'fastest'", "'none' in the workers", "it can be auto", "slots must be"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
