use std::sync::Arc;

use crate::{
    calibrate::Calibration,
    engine::{DiskTier, Permits, Tokenizer},
    refit::RefitConfig,
    route::RoutePolicy,
    schedule::{Answers, DispatchLimits, ModelRunner, PrefixConfig},
};

/// What an engine is made of. `LoadedModel` (feature `llama`) makes it from a model file and a configuration.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use std::sync::Arc;
///
/// use eldr::{
///     Engine,
///     engine::{EngineParts, EngineWorker, Permits},
///     route::LeastLoaded,
///     schedule::{DispatchLimits, FakeModel, FakeRunner, PrefixConfig},
/// };
///
/// # fn main() -> Result<(), eldr::EngineError> {
/// let model = FakeModel { n_vocab: 97, n_layer: 3, n_expert: 8, n_expert_used: 2 };
/// // One worker computes at a time: they share their cores.
/// let cores = Arc::new(Permits::new(1));
/// let worker = |name: &str| EngineWorker {
///     name: name.to_owned(),
///     runner: Box::new(FakeRunner::new(model, 4, 2048, Vec::new())),
///     permits: Some(Arc::clone(&cores)),
/// };
/// let engine = Engine::start(EngineParts {
///     prefill: vec![worker("prefill 0")],
///     decode: vec![worker("decode 0")],
///     tokenizer: Arc::new(fake::Letters),
///     policy: Box::new(LeastLoaded),
///     calibration: None,
///     limits: DispatchLimits::default(),
///     chunk: 16,
///     n_expert: 8,
///     prefix: PrefixConfig::default(),
/// })?;
/// let id = engine.add_decode(worker("decode 1"))?;
/// assert_eq!(engine.stats().workers.len(), id.index() + 1);
/// # Ok(())
/// # }
/// ```
pub struct EngineParts {
    /// Runners that prefill, each with the name of its device.
    pub prefill: Vec<EngineWorker>,
    /// Runners that decode.
    pub decode: Vec<EngineWorker>,
    /// Text to tokens and back.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// Chooses the decode worker of each request.
    pub policy: Box<dyn RoutePolicy>,
    /// Turns counts into signatures.
    pub calibration: Option<Arc<Calibration>>,
    /// Bounds of the queues.
    pub limits: DispatchLimits,
    /// Prompt tokens a prefill step runs: a prompt is cut at its multiples.
    pub chunk: u32,
    /// Experts a layer; 0 for a dense model.
    pub n_expert: u32,
    /// What prefill workers keep of finished prompts.
    pub prefix: PrefixConfig,
}

impl EngineParts {
    /// What decode workers tell of answers, if these go back to the prefix cache.
    pub(crate) fn answers(&self) -> Option<Answers> {
        let layers = &self.prefill.first()?.runner.info().tapped;
        (self.prefix.answers && self.prefix.max_tokens > 0).then(|| Answers {
            layers: layers.as_slice().into(),
            n_expert: self.n_expert,
            block: self.prefix.block,
        })
    }
}

/// What an engine may have besides its parts.
///
/// ```
/// # mod fake {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
/// # }
///
/// use std::sync::Arc;
///
/// use eldr::{
///     Engine,
///     engine::{DiskTier, EngineExtras, EngineParts},
///     route::LeastLoaded,
///     schedule::{DispatchLimits, PrefixConfig},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// let disk = DiskTier::open(folder.path(), vec![("model".to_owned(), "a toy".to_owned())], 1 << 20)?;
/// let parts = EngineParts {
///     prefill: vec![fake::worker("prefill 0")],
///     decode: vec![fake::worker("decode 0")],
///     tokenizer: Arc::new(fake::Letters),
///     policy: Box::new(LeastLoaded),
///     calibration: None,
///     limits: DispatchLimits::default(),
///     chunk: 16,
///     n_expert: 8,
///     prefix: PrefixConfig::default(),
/// };
/// let engine = Engine::start_with(parts, EngineExtras { refit: None, disk: Some(disk) })?;
/// assert!(engine.stats().workers.iter().all(|worker| worker.healthy));
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct EngineExtras {
    /// Fit the policy's centroids to the traffic; see [`Engine::start_refitting`](crate::Engine::start_refitting).
    pub refit: Option<RefitConfig>,
    /// Where prefixes go to outlive the engine.
    pub disk: Option<DiskTier>,
}

/// A runner and the cores it shares.
pub struct EngineWorker {
    /// Its name in logs and threads: `decode 3 on CPU`.
    pub name: String,
    /// Runs its steps.
    pub runner: Box<dyn ModelRunner>,
    /// The turns it takes with workers on the same cores; none where it has a device to itself.
    pub permits: Option<Arc<Permits>>,
}
