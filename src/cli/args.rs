//! The options that several verbs share, and the engine configuration they make.
//!
//! Never sets a default of its own: what is not given is the configuration's.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use clap::{
    Args,
    builder::{BoolishValueParser, PossibleValuesParser, TypedValueParser},
};
use eldr::{
    engine::{
        EngineConfig, EngineError, FlashAttention, KvFormat, PrefixBudget, WorkerList, read_calibration, threads_alone,
    },
    refit::RefitConfig,
    route::{PolicyKind, StepTime},
};

use super::{cost::read_cost, error::CliError};

/// Which model, and how it is loaded and run.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// GGUF model; the shipped test model without it
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Use the devices of the RPC server there; may be repeated
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub rpc: Vec<String>,
    /// Seconds an RPC server may keep a byte waiting before its workers are lost; by default 30
    #[arg(long, value_name = "SECONDS")]
    rpc_deadline: Option<u64>,
    /// Tokens of a slot, prompt and output together; by default 2048
    #[arg(short = 'c', long, visible_alias = "ctx-size", value_name = "N")]
    ctx: Option<u32>,
    /// Sequences a worker holds; by default 16
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Prompt tokens a prefill step runs; by default 512
    #[arg(long, value_name = "N")]
    chunk: Option<u32>,
    /// Threads of each CPU worker; by default the cores are divided, as by 0
    #[arg(short, long, value_name = "N")]
    threads: Option<u32>,
    /// Flash attention; by default auto, on unless all workers are CPUs
    #[arg(long, value_name = "WHERE", value_parser = flash_attention())]
    flash_attn: Option<FlashAttention>,
    /// Type of keys and values; by default f16
    #[arg(long, value_name = "TYPE", value_parser = kv_format())]
    kv_type: Option<KvFormat>,
    /// Divide the layers of each worker that names no device over every GPU and RPC server, as @all does
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    split: Option<bool>,
    /// Layers on the device, as llama.cpp's -ngl; by default all
    #[arg(long, value_name = "N")]
    n_gpu_layers: Option<u32>,
    /// Keep all experts in host memory
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    cpu_moe: Option<bool>,
    /// Keep the experts of the first N layers in host memory
    #[arg(long, value_name = "N")]
    n_cpu_moe: Option<u32>,
    /// Read the model file instead of mapping it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    no_mmap: Option<bool>,
    /// Let ggml repack weights and use AMX; `eldr doctor` tries it safely
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    extra_bufts: Option<bool>,
    /// Keep the whole sequence in layers with a sliding window, so that a prefix can be used again wherever it ends
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    swa_full: Option<bool>,
}

/// The workers and their queues.
#[derive(Debug, Clone, Default, Args)]
pub struct WorkerArgs {
    /// Prefill workers: 1, 1@cpu, 1@cuda:0,1@cuda:1, 1@cuda:0+cuda:1[split=3:1] (layers divided), 1@rpc:HOST:PORT, 1@cpu[0-3]
    /// (pinned) or 1@cuda:0[cpu-moe,threads=4]
    #[arg(long, value_name = "WORKERS")]
    pub prefill: Option<WorkerList>,
    /// Decode workers, as --prefill: 8, 8@cpu or 2@cuda:0,1@rpc:HOST:PORT,2@cpu[0-7]
    #[arg(long, value_name = "WORKERS")]
    pub decode: Option<WorkerList>,
    /// What a prefill worker keeps of finished prompts for others that begin alike: on (all its slots hold), off, a number
    /// of tokens, or a size such as 512MiB
    #[arg(long, value_name = "on|off|TOKENS|SIZE")]
    prefix_cache: Option<PrefixBudget>,
    /// MiB of host memory for prefixes that had to make room there
    #[arg(long, value_name = "MIB")]
    cache_ram: Option<u64>,
    /// A folder for such prefixes, which outlive the program there and may be shared by several
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// MiB of prefixes in that folder at most; by default 4096
    #[arg(long, value_name = "MIB")]
    cache_disk: Option<u64>,
    /// Let prompt and answer of a finished request go back to the prefix cache; decode steps are tapped then
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    cache_answers: Option<bool>,
    /// A file with a text that prompts begin with, such as a system prompt, which the prefix cache never drops; may be
    /// given several times
    #[arg(long, value_name = "FILE")]
    pin: Vec<PathBuf>,
    /// Requests that may wait, by default 1024; one more is refused
    #[arg(long, value_name = "N")]
    max_queue: Option<usize>,
    /// Requests given to a prefill worker at a time; by default 4
    #[arg(long, value_name = "N")]
    max_prefill: Option<usize>,
    /// Prefilled requests that may wait for a decode slot; by default 16
    #[arg(long, value_name = "N")]
    max_handoffs: Option<usize>,
    /// Times a request is prefilled again before it fails; by default 3
    #[arg(long, value_name = "N")]
    max_retries: Option<u32>,
    /// Times its turn's wait a request may wait for a slot while cheaper ones go first; 1 is in turn
    #[arg(long, value_name = "N")]
    age_bound: Option<u32>,
    /// Move running requests to workers where they cost less, at most one in so many decode steps; 0 is never
    #[arg(long, value_name = "N")]
    pub migrate_every: Option<u32>,
    /// Tell the policy what running requests really pick, from one decode step in so many; 0 is never
    #[arg(long, value_name = "N")]
    pub feedback: Option<u32>,
}

/// Where requests are recorded: one worker of each kind at a time.
#[derive(Debug, Clone, Default, Args)]
pub struct RecordingArgs {
    /// Where prompts are prefilled
    #[arg(long, value_name = "WORKER")]
    prefill: Option<WorkerList>,
    /// Where answers are generated
    #[arg(long, value_name = "WORKER")]
    decode: Option<WorkerList>,
}

/// How requests are routed.
#[derive(Debug, Clone, Default, Args)]
pub struct RouteArgs {
    /// Calibration file, from `eldr calibrate`
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Width of the locality band; without it, or auto, the calibration's
    #[arg(long, value_name = "TAU|auto")]
    tau: Option<TauChoice>,
    /// Fewest workers of the locality band; by default 1
    #[arg(long, value_name = "N")]
    min_band: Option<u32>,
    /// Let the calibration's centroids follow the traffic; on where the policy is auto
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    refit: Option<bool>,
    /// What steps take here, as `eldr bench --fit FILE` writes it: the marginal cost begins with it instead of learning it from nothing
    #[arg(long, value_name = "FILE", value_parser = step_time)]
    step_cost: Option<StepTime>,
}

/// Reads what steps take.
fn step_time(path: &str) -> Result<StepTime, String> {
    read_cost(Path::new(path)).map(|cost| cost.step_time()).map_err(|error| error.message)
}

/// How the width of the locality band is found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TauChoice {
    /// By replaying the requests.
    Auto,
    /// As given.
    Fixed(f32),
}

impl TauChoice {
    /// The width, if it is given.
    pub fn fixed(self) -> Option<f32> {
        match self {
            Self::Auto => None,
            Self::Fixed(tau) => Some(tau),
        }
    }
}

impl FromStr for TauChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("auto") {
            return Ok(Self::Auto);
        }
        match text.parse::<f32>() {
            Ok(tau) if (0.0..=2.0).contains(&tau) => Ok(Self::Fixed(tau)),
            _ => Err("it must be auto, or a number from 0 (only the most similar worker) to 2 (every worker)".into()),
        }
    }
}

/// A switch whose value may be given, so that a setting of the file can be switched off again.
pub fn switch() -> BoolishValueParser {
    BoolishValueParser::new()
}

/// The number of decode workers that a calibration was made for, where no other was asked for.
pub fn calibrated_workers(workers: &WorkerArgs, route: &RouteArgs) -> Result<Option<u32>, CliError> {
    let (None, Some(path)) = (&workers.decode, &route.calibration) else { return Ok(None) };
    let n_workers = read_calibration(path).map_err(EngineError::from)?.n_workers();
    u32::try_from(n_workers).map(Some).map_err(|_| CliError::input("the calibration has too many workers"))
}

fn flash_attention() -> impl TypedValueParser<Value = FlashAttention> {
    PossibleValuesParser::new(["auto", "on", "off"]).map(|name| match name.as_str() {
        "on" => FlashAttention::On,
        "off" => FlashAttention::Off,
        _ => FlashAttention::Auto,
    })
}

fn kv_format() -> impl TypedValueParser<Value = KvFormat> {
    PossibleValuesParser::new(["f16", "q8_0", "f32"]).map(|name| match name.as_str() {
        "q8_0" => KvFormat::Q8_0,
        "f32" => KvFormat::F32,
        _ => KvFormat::F16,
    })
}

impl ModelArgs {
    /// Puts what was given into `config`.
    pub fn configure(&self, config: &mut EngineConfig) {
        put(&mut config.n_ctx_slot, self.ctx);
        put(&mut config.n_slots, self.slots);
        // A batch is no longer than the slots it fills.
        config.chunk = self.chunk.unwrap_or(config.chunk.min(config.n_ctx_slot.max(1)));
        put(&mut config.n_threads, self.threads);
        put(&mut config.flash_attention, self.flash_attn);
        put(&mut config.kv_format, self.kv_type);
        put(&mut config.split, self.split);
        put(&mut config.n_gpu_layers, self.n_gpu_layers.map(Some));
        put(&mut config.cpu_moe, self.cpu_moe);
        put(&mut config.n_cpu_moe, self.n_cpu_moe);
        put(&mut config.rpc_deadline, self.rpc_deadline.map(Duration::from_secs));
        put(&mut config.use_mmap, self.no_mmap.map(|no| !no));
        put(&mut config.extra_bufts, self.extra_bufts);
        put(&mut config.swa_full, self.swa_full);
    }
}

impl WorkerArgs {
    /// Puts what was given into `config`.
    pub fn configure(&self, config: &mut EngineConfig) {
        put(&mut config.prefill, self.prefill.clone());
        put(&mut config.decode, self.decode.clone());
        put(&mut config.prefix_cache, self.prefix_cache);
        put(&mut config.cache_ram_mib, self.cache_ram);
        if self.cache_dir.is_some() {
            config.cache_dir.clone_from(&self.cache_dir);
        }
        put(&mut config.cache_disk_mib, self.cache_disk);
        put(&mut config.cache_answers, self.cache_answers);
        config.pins.extend(self.pin.iter().cloned());
        put(&mut config.limits.max_queue, self.max_queue);
        put(&mut config.limits.max_prefill, self.max_prefill);
        put(&mut config.limits.max_handoffs, self.max_handoffs);
        put(&mut config.limits.max_retries, self.max_retries);
        put(&mut config.limits.age_bound, self.age_bound);
        put(&mut config.limits.migrate_every, self.migrate_every);
        put(&mut config.feedback, self.feedback);
    }
}

impl RecordingArgs {
    /// The configuration of a recording with `model`.
    pub fn config(&self, model: &ModelArgs) -> EngineConfig {
        let mut config = EngineConfig { decode: WorkerList::best(1), ..EngineConfig::default() };
        model.configure(&mut config);
        put(&mut config.prefill, self.prefill.clone());
        put(&mut config.decode, self.decode.clone());
        if config.n_threads == 0 {
            // Recording runs one worker at a time.
            config.n_threads = threads_alone();
        }
        config
    }
}

impl RouteArgs {
    /// Puts what was given into `config`.
    pub fn configure(&self, config: &mut EngineConfig, policy: Option<PolicyKind>) {
        put(&mut config.policy, policy);
        let is_auto = config.policy == PolicyKind::Auto;
        config.heed_verdict = is_auto;
        config.calibration.clone_from(&self.calibration);
        config.tau = self.tau.and_then(TauChoice::fixed);
        put(&mut config.min_band, self.min_band);
        let refits = self.refit.unwrap_or(is_auto && self.calibration.is_some());
        config.refit = refits.then(RefitConfig::default);
        config.step_time = self.step_cost;
    }

    /// What was asked for and changes nothing under the policy that routes, each in a sentence.
    pub fn unused(&self, policy: &str, refits: bool) -> Vec<String> {
        let has_band = policy == PolicyKind::LocalityBand.name();
        let why = match &self.calibration {
            None if !has_band => format!("without --calibration requests are routed by {policy}"),
            _ => format!("requests are routed by {policy}"),
        };
        let tau = self.tau.and_then(TauChoice::fixed).is_some() && !has_band;
        let refit = self.refit == Some(true) && !refits;
        let cost = self.step_cost.is_some() && policy != PolicyKind::MarginalCost.name();
        let band = "which has no locality band";
        [
            tau.then(|| format!("--tau changes nothing: {why}, {band}")),
            (self.min_band.is_some() && !has_band).then(|| format!("--min-band changes nothing: {why}, {band}")),
            refit.then(|| format!("--refit changes nothing: {why}, which moves no centroids")),
            cost.then(|| {
                format!("--step-cost changes nothing: requests are routed by {policy}, which does not predict steps")
            }),
            (policy == PolicyKind::Domain.name()).then(|| {
                "policy domain goes by the labels of a workload, which requests do not have here: they are routed by \
                 load"
                    .to_owned()
            }),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Overwrites a default with what was given.
fn put<T>(place: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *place = value;
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser)]
    struct All {
        #[command(flatten)]
        model: ModelArgs,
        #[command(flatten)]
        workers: WorkerArgs,
        #[command(flatten)]
        route: RouteArgs,
    }

    fn config(args: &str) -> EngineConfig {
        let all = All::try_parse_from(["eldr"].into_iter().chain(args.split_whitespace())).expect("valid");
        let mut config = EngineConfig::default();
        all.model.configure(&mut config);
        all.workers.configure(&mut config);
        all.route.configure(&mut config, None);
        config
    }

    #[test]
    fn nothing_given_is_the_default() {
        assert_eq!(config(""), EngineConfig::default());
    }

    #[test]
    fn the_help_names_the_defaults() {
        let help = All::command().render_help().to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let EngineConfig { n_slots, n_ctx_slot, chunk, min_band, limits, .. } = EngineConfig::default();
        let limits = [limits.max_queue, limits.max_prefill, limits.max_handoffs, limits.max_retries as usize];
        let numbers = [n_slots, n_ctx_slot, chunk, min_band].map(|n| n as usize);
        for (option, number) in ["--slots", "--ctx", "--chunk", "--min-band"]
            .iter()
            .zip(numbers)
            .chain(["--max-queue", "--max-prefill", "--max-handoffs", "--max-retries"].iter().zip(limits))
        {
            let (_, text) = help.split_once(&format!("{option} <N>")).expect("an option");
            let (text, _) = text.split_once(" --").unwrap_or((text, ""));
            assert!(text.contains(&format!("by default {number}")), "{option}: {text}");
        }
    }

    #[test]
    fn every_part_of_the_configuration_is_reachable() {
        let got = config(
            "--prefill 1@cuda:0 --decode 2@cuda:0,2@cuda:1 --slots 3 -c 100 --chunk 7 -t 2 --flash-attn on --kv-type \
             q8_0 --split --n-gpu-layers 5 --cpu-moe --n-cpu-moe 4 --rpc-deadline 9 --no-mmap --extra-bufts --calibration c --tau 0.2 \
             --min-band 2 --refit --prefix-cache 64MiB --cache-ram 512 --cache-dir d \
             --cache-disk 77 --cache-answers --pin p --pin q --swa-full --max-queue 9 --max-prefill 8 --max-handoffs 6 \
             --max-retries 1 --age-bound 2 --migrate-every 64 --feedback 16",
        );
        let mut want = EngineConfig {
            prefill: "1@cuda:0".parse().expect("valid"),
            decode: "2@cuda:0,2@cuda:1".parse().expect("valid"),
            n_slots: 3,
            n_ctx_slot: 100,
            chunk: 7,
            n_threads: 2,
            flash_attention: FlashAttention::On,
            kv_format: KvFormat::Q8_0,
            split: true,
            n_gpu_layers: Some(5),
            cpu_moe: true,
            n_cpu_moe: 4,
            rpc_deadline: Duration::from_secs(9),
            use_mmap: false,
            extra_bufts: true,
            calibration: Some("c".into()),
            tau: Some(0.2),
            min_band: 2,
            refit: Some(RefitConfig::default()),
            prefix_cache: PrefixBudget::MiB(64),
            cache_ram_mib: 512,
            cache_dir: Some("d".into()),
            cache_disk_mib: 77,
            cache_answers: true,
            pins: vec!["p".into(), "q".into()],
            swa_full: true,
            feedback: 16,
            ..EngineConfig::default()
        };
        want.limits.max_queue = 9;
        want.limits.max_prefill = 8;
        want.limits.max_handoffs = 6;
        want.limits.max_retries = 1;
        want.limits.age_bound = 2;
        want.limits.migrate_every = 64;
        assert_eq!(got, want);
    }

    #[test]
    fn centroids_follow_the_traffic_unless_a_policy_is_named_or_it_is_switched_off() {
        assert!(config("--calibration c").refit.is_some());
        assert!(config("--calibration c --refit=off").refit.is_none());
        let mut named = EngineConfig::default();
        let route = RouteArgs { calibration: Some("c".into()), ..RouteArgs::default() };
        route.configure(&mut named, Some(PolicyKind::LocalityBand));
        assert_eq!((named.policy, named.heed_verdict, named.refit), (PolicyKind::LocalityBand, false, None));
    }

    // Symptom: `run --tau 0.1` without a calibration, `run --policy domain`, and `run --refit` with a calibration that
    // does not help were taken without a word, and did nothing.
    #[test]
    fn what_changes_nothing_is_told() {
        let unused = |args: &str, policy, refits| {
            All::try_parse_from(["eldr"].into_iter().chain(args.split_whitespace()))
                .expect("valid")
                .route
                .unused(policy, refits)
        };
        assert_eq!(
            unused("--tau 0.1 --min-band 2", "least_loaded", false),
            ["--tau", "--min-band"].map(|flag| format!(
                "{flag} changes nothing: without --calibration requests are routed by least_loaded, which has no \
                 locality band"
            ))
        );
        assert_eq!(
            unused("--calibration c --refit", "least_loaded", false),
            ["--refit changes nothing: requests are routed by least_loaded, which moves no centroids"]
        );
        assert!(unused("", "domain", false)[0].contains("labels"));
        for (args, policy, refits) in [
            ("--calibration c --tau 0.1 --min-band 2 --refit", "locality_band", true),
            ("--calibration c --refit", "marginal_cost", true),
            ("--tau auto", "least_loaded", false),
            ("--calibration c --refit=off", "marginal_cost", false),
            ("--calibration c", "least_loaded", false),
        ] {
            assert!(unused(args, policy, refits).is_empty(), "{args}");
        }
    }

    #[test]
    fn tau_is_auto_or_a_cosine_distance() {
        assert_eq!("Auto".parse(), Ok(TauChoice::Auto));
        assert_eq!("0.25".parse(), Ok(TauChoice::Fixed(0.25)));
        for wrong in ["", "-0.1", "2.5", "NaN", "wide"] {
            assert!(wrong.parse::<TauChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_switch_can_be_switched_off_again() {
        assert!(!config("--cpu-moe=off").cpu_moe);
        assert!(config("--no-mmap=0").use_mmap);
    }
}
