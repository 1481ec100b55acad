use std::ffi::c_char;

use super::{
    Status,
    args::{self, FromC, Growing},
    failure::{Failure, guard_done},
};
use crate::{
    engine::{EngineBuilder, EngineConfig},
    refit::RefitConfig,
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
    /// The routing policy's name; NULL is `auto`: `marginal_cost`, with centroids if there is a calibration, or
    /// `least_loaded` for a dense model and where the calibration says that locality does not help.
    pub policy: *const c_char,
    /// Prefill workers such as `1` or `2@cuda:0`; NULL is one on the best device.
    pub prefill: *const c_char,
    /// Decode workers such as `8@cpu` or `2@cuda:0,2@cuda:1`; NULL is two on the best device.
    pub decode: *const c_char,
    /// Sequences a worker holds.
    pub n_slots: u32,
    /// Tokens of a sequence, prompt and output together. More than the model was trained with are cut to that, which
    /// `n_ctx_slot` of eldr_engine_stats_json() tells.
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
    /// Requests given to one prefill worker at a time.
    pub max_prefill: u32,
    /// Prefilled requests that may wait for a place on a decode worker; prefill pauses at this many.
    pub max_handoffs: u32,
    /// Of those, the cheapest for the running batches goes first, as long as none waits for more than so many times its
    /// turn; 1 is everybody in turn.
    pub age_bound: u32,
    /// What prefill workers keep of finished prompts, for prompts that begin alike: `on`, `off`, a number of tokens, or
    /// a size such as `512MiB`; NULL is `on`.
    pub prefix_cache: *const c_char,
    /// MiB of host memory for what had to make room there; 0 is none.
    pub cache_ram_mib: u64,
    /// Fit the centroids to the traffic while serving: 0 does not, above 0 does; below 0 does where the policy is `auto`
    /// and there is a calibration.
    pub refit: i32,
    /// 0 for now.
    pub reserved: u32,
}

// SAFETY: repr(C); numbers, and pointers that may be NULL.
unsafe impl FromC for EngineParams {}

impl Growing for EngineParams {
    const NAME: &'static str = "eldr_engine_params";
    const FIRST_SIZE: usize = 160;

    fn defaults() -> Self {
        let config = EngineConfig::default();
        let null = std::ptr::null();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
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
            max_queue: count(config.limits.max_queue),
            max_prefill: count(config.limits.max_prefill),
            max_handoffs: count(config.limits.max_handoffs),
            age_bound: config.limits.age_bound,
            prefix_cache: null,
            cache_ram_mib: config.cache_ram_mib,
            refit: -1,
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
        let given = |builder: EngineBuilder, value, set: fn(EngineBuilder, &str) -> EngineBuilder| match value {
            Some(text) => set(builder, text),
            None => builder,
        };
        let mut builder = EngineConfig::builder().set(|config| self.numbers(config));
        builder = given(builder, text(self.prefill, "prefill")?, EngineBuilder::prefill);
        builder = given(builder, text(self.decode, "decode")?, EngineBuilder::decode);
        builder = given(builder, text(self.policy, "policy")?, EngineBuilder::policy);
        builder = given(builder, text(self.calibration, "calibration")?, |builder, path| builder.calibration(path));
        builder = given(builder, text(self.flash_attention, "flash_attention")?, EngineBuilder::flash_attention);
        builder = given(builder, text(self.kv_format, "kv_format")?, EngineBuilder::kv_format);
        builder = given(builder, text(self.prefix_cache, "prefix_cache")?, EngineBuilder::prefix_cache);
        if let Some(list) = text(self.domains, "domains")? {
            let domains = list.split(',').map(|name| name.trim().to_owned()).collect();
            builder = builder.set(|config| config.domains = domains);
        }
        let refit = self.refit;
        builder = builder.set(|config| {
            let refits = refit > 0 || (refit < 0 && config.policy == PolicyKind::Auto && config.calibration.is_some());
            config.refit = refits.then(RefitConfig::default);
        });
        builder.build().map_err(|problems| Failure::new(Status::Config, problems))
    }

    fn numbers(&self, config: &mut EngineConfig) {
        config.n_slots = self.n_slots;
        config.n_ctx_slot = self.n_ctx_slot;
        config.chunk = self.chunk;
        config.n_threads = self.n_threads;
        config.n_gpu_layers = u32::try_from(self.n_gpu_layers).ok();
        config.cpu_moe = self.n_cpu_moe < 0;
        config.n_cpu_moe = u32::try_from(self.n_cpu_moe).unwrap_or(0);
        config.exact = self.exact != 0;
        config.use_mmap = self.use_mmap != 0;
        config.tau = Some(self.tau).filter(|tau| !tau.is_nan());
        config.min_band = self.min_band;
        config.seed = self.seed;
        config.cache_ram_mib = self.cache_ram_mib;
        config.limits.max_queue = self.max_queue as usize;
        config.limits.max_prefill = self.max_prefill as usize;
        config.limits.max_handoffs = self.max_handoffs as usize;
        config.limits.age_bound = self.age_bound;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{KvFormat, PrefixBudget};

    fn config(params: &EngineParams) -> Result<EngineConfig, Failure> {
        // SAFETY: the tests pass literals.
        unsafe { params.config() }
    }

    #[test]
    fn the_defaults_are_the_engine_s() {
        assert_eq!(config(&EngineParams::defaults()).expect("valid"), EngineConfig::default());
        let named = EngineParams { policy: c"least_loaded".as_ptr(), ..EngineParams::defaults() };
        assert!(!config(&named).expect("valid").heed_verdict, "a policy asked for by name is used");
    }

    #[test]
    fn what_is_given_is_set() {
        let given = EngineParams {
            calibration: c"Cargo.toml".as_ptr(),
            prefix_cache: c"512MiB".as_ptr(),
            cache_ram_mib: 64,
            age_bound: 2,
            max_prefill: 3,
            max_handoffs: 5,
            kv_format: c"f32".as_ptr(),
            domains: c"code, math".as_ptr(),
            ..EngineParams::defaults()
        };
        let config = config(&given).expect("valid");
        assert_eq!((config.prefix_cache, config.cache_ram_mib), (PrefixBudget::MiB(512), 64));
        assert_eq!((config.limits.age_bound, config.limits.max_prefill, config.limits.max_handoffs), (2, 3, 5));
        assert_eq!((config.kv_format, config.domains), (KvFormat::F32, vec!["code".to_owned(), "math".to_owned()]));
        assert_eq!(config.refit, Some(RefitConfig::default()), "auto refits a calibration");
        let still = EngineParams { refit: 0, ..given };
        assert_eq!(self::config(&still).expect("valid").refit, None);
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
        let text = failure.message();
        assert_eq!(text.lines().count(), 4, "{text}");
        for part in ["unknown policy 'fastest'", "'none' does not start", "'maybe' is not auto", "slots must be"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
