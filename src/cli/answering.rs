//! What `run` and `serve` are told alike: the model, its workers, and how requests are routed to them.
//!
//! Never starts an engine.

use clap::Args;
use eldr::{
    engine::{Engine, EngineConfig, WorkerList},
    route::PolicyKind,
};

use super::{
    args::{ModelArgs, RouteArgs, WorkerArgs, calibrated_workers, switch},
    error::CliError,
    output::note,
};

/// An engine for requests that were not there before.
#[derive(Debug, Args)]
pub struct AnswerArgs {
    /// Make texts independent of workers and company, to the bit, on the CPU without flash attention
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    exact: Option<bool>,
    /// Routing policy; auto, as without it, is the best for the model and the calibration
    #[arg(long, value_name = "NAME")]
    policy: Option<PolicyKind>,
    #[command(flatten)]
    route: RouteArgs,
    #[command(flatten)]
    workers: WorkerArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

impl AnswerArgs {
    /// `config` with what was given; where no number of decode workers was, with the calibration's.
    pub fn configure(&self, mut config: EngineConfig) -> Result<EngineConfig, CliError> {
        if let Some(n) = calibrated_workers(&self.workers, &self.route)? {
            config.decode = WorkerList::best(n);
        }
        self.model.configure(&mut config);
        self.workers.configure(&mut config);
        self.route.configure(&mut config, self.policy);
        config.exact = self.exact.unwrap_or(config.exact);
        Ok(config)
    }

    /// Says which of the options about routing change nothing in `engine`.
    pub fn note_unused(&self, engine: &Engine) {
        let policy = engine.policy_name();
        let unused = self.route.unused(policy, engine.stats().refit.is_some());
        for unused in unused.into_iter().chain(self.workers.unused([policy])) {
            note(&unused);
        }
    }
}
