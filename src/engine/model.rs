use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    calibrate::Calibration,
    engine::{
        DiskTier, Engine, EngineConfig, EngineError, EngineExtras, EngineParts, EngineWorker, FlashAttention, KvFormat,
        LlamaRunner, ModelTokenizer, Placed, Plan, TapUse, Tokenizer, WorkerList, WorkerSpec,
        copies::{Copies, ReadyWorker, kv_type},
        prefix_notes::{PrefixFacts, vain_pin, without_effect},
        read_calibration,
        residents::Lent,
        sharing::{Sharing, host_experts},
        versions, weights,
    },
    llama::{CpuMoe, DeviceKind, Model, ModelFacts},
    route::{AutoFacts, MarginalCostParams, PolicyKind, PolicyParams, RoutePolicy, StepDown, choose},
    schedule::{Job, PrefillWorker, PrefixConfig, RunnerInfo, WorkerEvent},
    signature::ExpertCounts,
    sim::Verdict,
    types::{MoeShape, Request, RequestId, SamplingParams, Token},
};

/// A GGUF model on the devices of a configuration's workers: one copy for each device and place of its experts.
#[derive(Clone)]
pub struct LoadedModel {
    copies: Arc<Copies>,
    /// The first copy, for what all know.
    model: Model,
    path: PathBuf,
}

impl LoadedModel {
    /// Checks the configuration, and what it takes against what is free, and loads the file once for each device it names.
    pub fn load(path: &Path, config: &EngineConfig) -> Result<Self, EngineError> {
        config.check()?;
        config.cache_dir.as_deref().map_or(Ok(()), DiskTier::check)?;
        let sharing = Sharing::of(config)?;
        // A small file that is mapped takes no memory to speak of, and is needed in any case.
        let early = (!sharing.on_device && config.use_mmap && is_small(path))
            .then(|| Copies::load(path, config, sharing.clone()))
            .transpose()?;
        let fits = early.as_ref().is_some_and(|copies| Plan::is_needless(&copies.first().model, config, &sharing));
        if !fits && let Some(refusal) = Plan::refusal(path, config, &sharing) {
            return Err(EngineError::Config(refusal));
        }
        let copies = Arc::new(early.map_or_else(|| Copies::load(path, config, sharing), Ok)?);
        let model = copies.first().model;
        if let Some(warning) = cut_context(config.n_ctx_slot, model.facts().n_ctx_train) {
            log::warn!("{warning}");
        }
        let threads = &copies.sharing.threads;
        if config.exact && config.flash_attention == FlashAttention::On && threads.n_threads > 1 {
            log::warn!(
                "flash attention on {} threads a worker is not exact: a text may depend on its company; give each worker \
                 one thread, or switch flash attention off",
                threads.n_threads
            );
        }
        Ok(Self { copies, model, path: path.to_owned() })
    }

    /// Whether zero rows were added to its experts: same outputs and picks, larger weights.
    pub fn is_inflated(&self) -> bool {
        self.model().is_inflated()
    }

    /// Whether every worker computes in the thread that calls it: one thread each, on the CPU.
    pub fn computes_in_the_callers_thread(&self) -> bool {
        self.copies.sharing.threads.n_threads == 1 && !self.copies.sharing.on_device
    }

    /// Size and shape.
    pub fn facts(&self) -> &ModelFacts {
        self.model().facts()
    }

    /// The experts; none for a dense model.
    pub fn moe_shape(&self) -> Option<&MoeShape> {
        self.model().moe_shape()
    }

    /// Every key and value of the file's metadata that is no list.
    pub fn metadata(&self) -> Vec<(String, String)> {
        self.model().metadata()
    }

    /// Bytes of keys and values a token takes.
    pub fn kv_bytes_per_token(&self, format: KvFormat) -> u64 {
        self.model().kv_bytes_per_token(kv_type(format), kv_type(format))
    }

    /// The model's chat template, if it has one.
    pub fn chat_template(&self) -> Option<String> {
        self.model().chat_template().map(str::to_owned)
    }

    /// The texts of the tokens in front of a prompt and at the end of a text; empty where the vocabulary has none.
    pub fn border_tokens(&self) -> (String, String) {
        let model = self.model();
        let text = |token: Option<Token>| token.and_then(|token| model.text(&[token]).ok()).unwrap_or_default();
        (text(model.bos()), text(model.eos()))
    }

    /// Messages (role, content) as a prompt that asks for the assistant's answer.
    pub fn chat(&self, messages: &[(&str, &str)]) -> Result<String, EngineError> {
        Ok(self.model().chat(messages, true)?)
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> Arc<dyn Tokenizer> {
        Arc::new(ModelTokenizer::new(self.model().clone()))
    }

    /// The experts a prompt picks, over all usable layers; none for a dense model.
    pub fn capture(&self, config: &EngineConfig, prompt: &[Token]) -> Result<Option<ExpertCounts>, EngineError> {
        let one = EngineConfig { prefill: config.prefill.first(), ..config.clone() };
        let mut worker = self.prefill_workers(&one, &self.usable_layers())?.remove(0);
        let runner = worker.runner.as_mut();
        let n_ctx_slot = runner.info().n_ctx_slot as usize;
        if prompt.is_empty() || prompt.len() > n_ctx_slot {
            let n = prompt.len();
            return Err(EngineError::Request(format!("the prompt has {n} tokens and must have 1 to {n_ctx_slot}")));
        }
        let n_expert = self.moe_shape().map_or(0, |shape| shape.n_expert);
        let mut scheduler = PrefillWorker::new(runner.info(), self.chunk(config), 1, &[], n_expert);
        // Two tokens, so that the prompt is handed on with its counts instead of ending here.
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: 2,
            sampling: SamplingParams::default(),
            domain: None,
            deadline: None,
        };
        scheduler.admit(Job::new(RequestId(0), Arc::new(request)));
        let mut events = Vec::new();
        while !scheduler.is_idle() {
            scheduler.step(runner, &mut events);
        }
        for event in events {
            match event {
                WorkerEvent::Prefilled(handoff) => return Ok(handoff.counts),
                WorkerEvent::Returned { error, .. } | WorkerEvent::Lost { error } => {
                    return Err(EngineError::Run(error));
                }
                WorkerEvent::Token { .. }
                | WorkerEvent::Finished { .. }
                | WorkerEvent::Cache(_)
                | WorkerEvent::Left(_)
                | WorkerEvent::Moved(_)
                | WorkerEvent::Stayed { .. } => {}
            }
        }
        Ok(None)
    }

    /// Tokens a sequence of a worker may have: as configured, but no more than the model was trained with.
    pub fn n_ctx_slot(&self, config: &EngineConfig) -> u32 {
        config.n_ctx_slot.min(self.facts().n_ctx_train)
    }

    /// Prompt tokens a prefill step runs: as configured, but no more than a slot holds.
    pub fn chunk(&self, config: &EngineConfig) -> u32 {
        config.chunk.min(self.n_ctx_slot(config))
    }

    /// Prefill workers as configured, counting the experts of MoE layers `tapped`.
    pub fn prefill_workers(&self, config: &EngineConfig, tapped: &[u32]) -> Result<Vec<EngineWorker>, EngineError> {
        let tap = if tapped.is_empty() { TapUse::Off } else { TapUse::Prefill(tapped.to_vec()) };
        self.workers("prefill", &config.prefill, config, &tap)
    }

    /// Decode workers as configured; the experts of one step in `tap_every` are counted, those of no step if it is 0.
    pub fn decode_workers(&self, config: &EngineConfig, tap_every: u32) -> Result<Vec<EngineWorker>, EngineError> {
        let tap = if tap_every > 0 && self.moe_shape().is_some() { TapUse::Decode(tap_every) } else { TapUse::Off };
        self.workers("decode", &config.decode, config, &tap)
    }

    /// What a prefill worker keeps of finished prompts, as configured; what a model's memory does not allow is said.
    pub fn prefix(&self, config: &EngineConfig) -> PrefixConfig {
        let facts = self.facts();
        let max_tokens = config.prefix_cache.tokens(self.kv_bytes_per_token(config.kv_format));
        let stores = config.cache_ram_mib > 0 || config.cache_dir.is_some();
        let third =
            if stores { "" } else { "; with --cache-ram, a third prompt that begins alike finds a copy made for it" };
        if max_tokens > 0 && (facts.recurrent || facts.hybrid) {
            log::warn!(
                "the model has recurrent layers, whose memory can not be cut: what a finished prompt leaves behind is used \
                 only by prompts that go on after its last token{third}"
            );
        } else if max_tokens > 0 && facts.n_swa > 0 && !config.swa_full {
            log::warn!(
                "the model has a sliding window of {} tokens: what a finished prompt leaves behind is used only while the \
                 window reaches back from where a new prompt goes on{third}; --swa-full keeps all of it",
                facts.n_swa
            );
        }
        let (block, chunk) = (PrefixConfig::default().block, self.chunk(config));
        for note in without_effect(config, self.prefix_facts(config)) {
            log::warn!("{note}");
        }
        let common =
            (1..=block).map(|n| n * chunk).find(|n| n.is_multiple_of(block)).expect("at last block times chunk");
        let align = if config.exact { common } else { 1 };
        let (ram_bytes, answers) = (config.cache_ram_mib << 20, config.cache_answers);
        PrefixConfig { max_tokens, block, ram_bytes, align, answers }
    }

    fn prefix_facts(&self, config: &EngineConfig) -> PrefixFacts {
        PrefixFacts {
            n_swa: self.facts().n_swa,
            max_tokens: config.prefix_cache.tokens(self.kv_bytes_per_token(config.kv_format)),
            block: PrefixConfig::default().block,
            n_ctx_slot: self.n_ctx_slot(config),
        }
    }

    /// The configured folder for prefixes, which depend on what `info` says of a prefill worker, on the weights and on how
    /// prompts are cut.
    pub fn disk_tier(&self, config: &EngineConfig, info: &RunnerInfo) -> Result<Option<DiskTier>, EngineError> {
        let Some(path) = &config.cache_dir else { return Ok(None) };
        let weights = weights::sample(&self.path).map_err(|error| unreadable(&self.path, &error))?;
        let mut fingerprint: Vec<_> =
            info.fingerprint.0.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let more = [
            ("weights", weights),
            ("device", self.model().device().name().to_owned()),
            ("chunk", self.chunk(config).to_string()),
            ("exact", config.exact.to_string()),
            ("llama.cpp", versions().llama_cpp),
        ];
        fingerprint.extend(more.map(|(name, value)| (name.to_owned(), value)));
        DiskTier::open(path, fingerprint, config.cache_disk_mib.saturating_mul(1 << 20)).map(Some)
    }

    /// Reads the configured pins as tokens.
    fn pins(&self, config: &EngineConfig) -> Result<Vec<Vec<Token>>, EngineError> {
        let read = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))?;
            let tokens = self.tokenizer().tokenize(&text).map_err(EngineError::Request)?;
            if let Some(note) = vain_pin(&path.display().to_string(), tokens.len(), self.prefix_facts(config)) {
                log::warn!("{note}");
            }
            Ok(tokens)
        };
        config.pins.iter().map(read).collect()
    }

    /// One decode worker more for an engine of this model (see [`Engine::add_decode`]), on the device named, which must
    /// be one of `config`'s; none is the best. It shares the device's weights and cores with the others.
    pub fn decode_worker(
        &self,
        config: &EngineConfig,
        index: usize,
        device: Option<&str>,
    ) -> Result<EngineWorker, EngineError> {
        let placed =
            config.decode.placed().chain(config.prefill.placed()).find(|at| at.spec.device.as_deref() == device);
        let spec = placed.map_or_else(WorkerSpec::default, |placed| placed.spec.clone());
        // The processors of that entry are taken already.
        let spec = WorkerSpec { device: device.map(str::to_owned), cpus: None, n: 1, ..spec };
        let placed = Placed { spec: &spec, index: 0 };
        Ok(engine_worker(self.copies.worker("decode", index, placed, config, &TapUse::Off)?))
    }

    /// MoE layers whose experts the first decode worker keeps in host memory: all, on the CPU.
    pub fn n_host_layers(&self, config: &EngineConfig) -> usize {
        let layers = self.moe_shape().map_or(&[][..], |shape| &shape.layers);
        let spec = config.decode.0.first().cloned().unwrap_or_default();
        let on_cpu = match &spec.device {
            Some(name) => name.eq_ignore_ascii_case("cpu"),
            None => self.copies.sharing.best.kind() == DeviceKind::Cpu,
        };
        match host_experts(config, &spec) {
            _ if on_cpu => layers.len(),
            CpuMoe::All => layers.len(),
            CpuMoe::None => 0,
            CpuMoe::First(n) => layers.iter().filter(|&&layer| layer < n).count(),
        }
    }

    /// MoE layers a signature may use; none for a dense model.
    pub fn usable_layers(&self) -> Vec<u32> {
        self.moe_shape().map(MoeShape::usable).unwrap_or_default()
    }

    /// Reads and checks the configured calibration, if there is one.
    pub fn calibration(&self, config: &EngineConfig) -> Result<Option<Arc<Calibration>>, EngineError> {
        let Some(path) = &config.calibration else { return Ok(None) };
        let Some(shape) = self.moe_shape() else {
            return Err(EngineError::Calibration(format!(
                "{}: the model is dense, so it has no experts to calibrate; leave the calibration out",
                path.display()
            )));
        };
        let calibration = read_calibration(path)?;
        let fits = calibration.check(shape, &self.facts().fingerprint, config.decode.n_workers());
        fits.map_err(|error| EngineError::Calibration(format!("{}: {error}", path.display())))?;
        Ok(Some(Arc::new(calibration)))
    }

    /// The configured policy. A policy that goes by locality gives way to the least loaded worker, and says so, where the
    /// model is dense or, if [`EngineConfig::heed_verdict`], where its calibration says that locality does not help; what
    /// `auto` becomes is [`choose`]'s, and why is said too.
    pub fn policy(
        &self,
        config: &EngineConfig,
        calibration: Option<&Calibration>,
    ) -> Result<Box<dyn RoutePolicy>, EngineError> {
        self.policy_and_note(config, calibration).map(|(policy, _)| policy)
    }

    /// The policy, and why it is less than what was asked for.
    fn policy_and_note(
        &self,
        config: &EngineConfig,
        calibration: Option<&Calibration>,
    ) -> Result<(Box<dyn RoutePolicy>, Option<String>), EngineError> {
        let mut kind = config.policy;
        let mut note = None;
        if kind == PolicyKind::Auto {
            (kind, note) = self.auto(config, calibration);
        }
        if kind.needs_calibration() && calibration.is_none() {
            if self.moe_shape().is_some() {
                return Err(EngineError::Config(format!(
                    "policy {kind} needs a calibration file: make one with `eldr calibrate` and give it with \
                     --calibration"
                )));
            }
            log::warn!("{}", StepDown::Dense.sentence());
            note = Some(StepDown::Dense.sentence().to_owned());
            kind = PolicyKind::LeastLoaded;
        }
        if config.heed_verdict
            && kind.needs_calibration()
            && let Some(verdict) = calibration.and_then(Verdict::of).filter(|verdict| !verdict.helps)
        {
            log::warn!("{}", verdict.sentence());
            note = Some(verdict.sentence());
            kind = PolicyKind::LeastLoaded;
        }
        let policy = kind.build(&self.policy_params(config, calibration));
        Ok((policy.map_err(|error| EngineError::Config(error.to_string()))?, note))
    }

    fn policy_params(&self, config: &EngineConfig, calibration: Option<&Calibration>) -> PolicyParams {
        PolicyParams {
            seed: config.seed,
            n_workers: config.decode.n_workers(),
            tau: config.tau.unwrap_or_else(|| calibration.map_or(0.1, |c| c.tau)),
            min_band: config.min_band,
            centroids: calibration.map(|c| Arc::new(c.centroids.clone())),
            domains: config.domains.clone(),
            shape: self.moe_shape().cloned(),
            marginal: MarginalCostParams { feedback: config.feedback, ..MarginalCostParams::default() },
            step_time: config.step_time,
        }
    }

    fn auto(&self, config: &EngineConfig, calibration: Option<&Calibration>) -> (PolicyKind, Option<String>) {
        let verdict = calibration.and_then(Verdict::of).filter(|_| config.heed_verdict);
        let (kind, why) = choose(&AutoFacts {
            has_experts: self.moe_shape().is_some(),
            n_workers: config.decode.n_workers(),
            may_overtake: config.limits.age_bound > 1,
            is_calibrated: calibration.is_some(),
            helps: verdict.as_ref().map(|verdict| verdict.helps),
        });
        let note = match (why, verdict) {
            (Some(StepDown::NoHelp), Some(verdict)) => Some(verdict.sentence()),
            (why, _) => why.map(|why| why.sentence().to_owned()),
        };
        match (why, &note) {
            (Some(StepDown::NoHelp | StepDown::Dense), Some(note)) => log::warn!("{note}"),
            (_, Some(note)) => log::info!("{note}"),
            (_, None) => {}
        }
        (kind, note)
    }

    /// The layers whose picks a policy needs counted.
    fn tapped(&self, policy: &dyn RoutePolicy, calibration: Option<&Calibration>) -> Vec<u32> {
        match (policy.name().parse::<PolicyKind>(), calibration) {
            (Ok(kind), _) if kind.uses_counts() => self.usable_layers(),
            (Ok(kind), Some(calibration)) if kind.uses_centroids() => calibration.layers.clone(),
            _ => Vec::new(),
        }
    }

    /// An engine as configured.
    pub fn engine(&self, config: &EngineConfig) -> Result<Engine, EngineError> {
        let calibration = self.calibration(config)?;
        let (policy, note) = self.policy_and_note(config, calibration.as_deref())?;
        let tapped = self.tapped(policy.as_ref(), calibration.as_deref());
        // A dense model, or one that locality does not help, is routed by load.
        let lent = Lent {
            params: self.policy_params(config, calibration.as_deref()),
            counts_all: tapped == self.usable_layers(),
            counts_mask: calibration.as_ref().is_some_and(|c| c.layers.iter().all(|layer| tapped.contains(layer))),
        };
        let refit = config.refit.clone().filter(|_| !tapped.is_empty() && calibration.is_some());
        // Answers come back with their picks, which every step must then tell.
        let sampled = refit.as_ref().map_or(0, |refit| refit.sample_decode);
        let told = [sampled, policy.feedback()].into_iter().filter(|&every| every > 0).min().unwrap_or(0);
        let tap_every = if config.cache_answers && !tapped.is_empty() { 1 } else { told };
        let pins = self.pins(config)?;
        let prefill = self.prefill_workers(config, &tapped)?;
        let disk = match prefill.first() {
            Some(worker) => self.disk_tier(config, worker.runner.info())?,
            None => None,
        };
        let parts = EngineParts {
            prefill,
            decode: self.decode_workers(config, tap_every)?,
            tokenizer: self.tokenizer(),
            policy,
            calibration,
            limits: config.limits,
            chunk: self.chunk(config),
            n_expert: self.moe_shape().map_or(0, |shape| shape.n_expert),
            prefix: self.prefix(config),
        };
        let engine = Engine::start_with(parts, EngineExtras { refit, disk })?;
        pins.iter().try_for_each(|tokens| engine.pin(tokens))?;
        Ok(engine.with_policy_note(note).lending(lent.builder()))
    }

    fn model(&self) -> &Model {
        &self.model
    }

    fn workers(
        &self,
        kind: &'static str,
        list: &WorkerList,
        config: &EngineConfig,
        tap: &TapUse,
    ) -> Result<Vec<EngineWorker>, EngineError> {
        let workers = list.placed().enumerate();
        workers.map(|(index, placed)| self.copies.worker(kind, index, placed, config, tap).map(engine_worker)).collect()
    }

    /// The first prefill worker's runner, with a tap on all usable layers and, if asked for, on their gates.
    pub(super) fn tap_runner(&self, config: &EngineConfig, gates: bool) -> Result<LlamaRunner, EngineError> {
        let layers = self.usable_layers();
        let tap = if gates { TapUse::Gates(layers) } else { TapUse::Prefill(layers) };
        let placed = config.prefill.placed().next().expect("at least one prefill worker");
        Ok(self.copies.worker("prefill", 0, placed, config, &tap)?.runner)
    }
}

fn engine_worker(ReadyWorker { name, runner, permits }: ReadyWorker) -> EngineWorker {
    EngineWorker { name, runner: Box::new(runner), permits }
}

impl Engine {
    /// Loads a model and starts an engine as configured.
    pub fn open(path: &Path, config: &EngineConfig) -> Result<Self, EngineError> {
        LoadedModel::load(path, config)?.engine(config)
    }
}

/// What to say when slots get less context than asked for; nothing where the default is cut, which nobody asked for.
fn cut_context(asked: u32, trained: u32) -> Option<String> {
    let is_cut = asked > trained && asked != EngineConfig::default().n_ctx_slot;
    is_cut.then(|| format!("the model was trained with {trained} tokens of context: slots hold {trained}, not {asked}"))
}

/// Under a gigabyte and in one file.
fn is_small(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.len() < 1 << 30)
}

fn unreadable(path: &Path, error: &std::io::Error) -> EngineError {
    EngineError::Config(format!("cannot read {}: {error}; name a file that can be read", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: a context above the trained one was cut without a word.
    #[test]
    fn a_cut_context_is_told_unless_it_is_the_default() {
        let want = "the model was trained with 1024 tokens of context: slots hold 1024, not 4000";
        assert_eq!(cut_context(4000, 1024).as_deref(), Some(want));
        assert_eq!(cut_context(1024, 1024), None);
        assert_eq!(cut_context(EngineConfig::default().n_ctx_slot, 8), None);
    }
}
