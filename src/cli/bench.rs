//! `eldr bench`: a workload under several policies; a table, a JSON report and a drawing of it.
//!
//! Never measures anything itself.

use std::path::{Path, PathBuf};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use eldr::{
    bench::{
        self, BenchParams, BenchReport, Clock, chart,
        rows::{ROWS_VERSION, Rows, rows_of},
        table,
        workload::{self, Arrivals},
    },
    engine::{EngineConfig, PrefixBudget, WorkerList, check_output, replace_file},
    route::{ParsePolicyError, PolicyKind},
    types::shown,
};

use super::{
    args::{ModelArgs, RouteArgs, WorkerArgs, calibrated_workers, switch},
    cost::read_cost,
    error::{CliError, Kind},
    model::shipped_or,
    output::{Output, note},
    progress,
    sweep::{self, Sweep},
    usage,
};

/// Repeats beyond these narrow no interval.
const MOST_REPEATS: u32 = 1000;
/// Each is held in memory, prompt and times.
const MOST_REQUESTS: usize = 1_000_000;

/// Decode workers without a calibration that says how many.
const N_DECODE: u32 = 8;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Write the report as JSON there; alone or -, print just that
    #[arg(long, value_name = "OUT", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Draw the report there
    #[arg(long, value_name = "OUT")]
    svg: Option<PathBuf>,
    /// Write the measurements as rows there, for `eldr report`
    #[arg(long, value_name = "OUT")]
    rows: Option<PathBuf>,
    /// Measure what steps take and write it there, for `eldr simulate`; with one decode worker and batches up to --slots
    #[arg(long, value_name = "OUT", conflicts_with_all = ["sweep", "repeats", "json", "svg", "policies"])]
    fit: Option<PathBuf>,
    /// Write there what the steps of this bench took, for `eldr simulate`; --fit measures more sizes of batches
    #[arg(long, value_name = "OUT", conflicts_with_all = ["sweep", "repeats", "fit", "no_count"])]
    cost: Option<PathBuf>,
    /// Let every step take what this file of --fit, --cost or by hand says, instead of timing it: the same on every machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["fit", "cost", "no_count"])]
    charge: Option<PathBuf>,
    /// Compare several values of rate, workers, slots, concurrency or tau, such as rate=1,2,4; may be repeated
    #[arg(long, value_name = "NAME=VALUES", conflicts_with_all = ["json", "svg"])]
    sweep: Vec<Sweep>,
    /// Times each measurement is repeated, in turn, with another seed each
    #[arg(long, value_name = "N", conflicts_with_all = ["json", "svg"])]
    repeats: Option<u32>,
    /// JSON lines with an id, a prompt and perhaps a domain and most tokens
    #[arg(long, value_name = "FILE")]
    workload: PathBuf,
    /// Policies in the order of the runs, or all
    #[arg(long, value_name = "NAMES", default_value = "all", value_parser = policies)]
    policies: Policies,
    /// Wall time, or steps computed and timed one at a time
    #[arg(long, value_name = "CLOCK", default_value = "virtual", value_parser = clock())]
    clock: Clock,
    /// Requests a second, arriving at random; without it all arrive at once
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// Requests arrive for ON seconds, then pause for OFF; the rate is the average
    #[arg(long, value_name = "ON,OFF", value_parser = burst)]
    burst: Option<(f64, f64)>,
    /// Requests in the system at most; the next arrives when one ends
    #[arg(long, value_name = "N")]
    concurrency: Option<usize>,
    /// Leave out prompts of more tokens
    #[arg(long, value_name = "N")]
    max_prompt: Option<usize>,
    /// Requests to serve; the workload is cut or repeated to it
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Tokens of a request that names none
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64)]
    max_tokens: u32,
    /// Tokens of every request, whatever the workload says
    #[arg(long, value_name = "N")]
    output_tokens: Option<u32>,
    /// Temperature of the outputs; 0 takes the likeliest tokens
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f32,
    /// Seed of arrivals, outputs and policies
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Share of the requests that is warm-up and not measured
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    warmup: f64,
    /// Skip the second run of each policy, which counts distinct experts
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    no_count: Option<bool>,
    /// Let a step of one sequence run alone, as `run` does; outputs may then differ in company
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    no_exact: Option<bool>,
    #[command(flatten)]
    route: RouteArgs,
    #[command(flatten)]
    workers: WorkerArgs,
    #[command(flatten)]
    model: ModelArgs,
}

/// A list of policies as given.
#[derive(Debug, Clone)]
struct Policies {
    kinds: Vec<PolicyKind>,
    all: bool,
}

fn policies(list: &str) -> Result<Policies, ParsePolicyError> {
    Ok(Policies { kinds: PolicyKind::parse_list(list)?, all: list.trim() == "all" })
}

fn clock() -> impl TypedValueParser<Value = Clock> {
    PossibleValuesParser::new(["virtual", "real"]).map(|name| match name.as_str() {
        "real" => Clock::Real,
        _ => Clock::Virtual,
    })
}

fn burst(text: &str) -> Result<(f64, f64), String> {
    let wrong = || format!("'{}' is not two numbers of seconds, such as 2,3", shown(text));
    let (on, off) = text.split_once(',').ok_or_else(wrong)?;
    Ok((on.trim().parse().map_err(|_| wrong())?, off.trim().parse().map_err(|_| wrong())?))
}

impl BenchArgs {
    /// Whether standard output takes the report and nothing else.
    pub fn json_to_stdout(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }

    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let mut params = self.params()?;
        if params.charge.is_some() && params.clock == Clock::Real {
            return Err(CliError::usage("--charge is for the virtual clock: leave out --clock real"));
        }
        self.check_labels(&mut params.policies)?;
        sweep::check(&self.sweep, &params)?;
        self.check_outputs(&params.model)?;
        self.model.add_rpc(&params.config)?;
        if self.cost.is_some() && (params.clock == Clock::Real || params.config.prefix_cache != PrefixBudget::Off) {
            let why = "--cost needs steps timed one at a time: leave out --clock real and --prefix-cache";
            return Err(CliError::usage(why));
        }
        if self.fit.is_none() {
            self.workers.unused(params.policies.iter().map(|kind| kind.name())).iter().for_each(|unused| note(unused));
        }
        progress::end_on_interrupt("no report was written; fewer --requests or --policies end sooner");
        if let Some(path) = &self.fit {
            let rows = sweep::fit(&params, path, output)?;
            return self.rows.as_ref().map_or(Ok(()), |path| sweep::write(path, &rows.to_json()));
        }
        if !self.sweep.is_empty() || self.repeats.is_some() {
            let rows = sweep::sweep(&params, &self.sweep, self.repeats.unwrap_or(1))?;
            return sweep::show(&rows, self.rows.as_ref(), output);
        }
        let report = sweep::watched(&params, |params, hear| bench::run(params, hear))?;
        if let Some(path) = &self.rows {
            let setting = [("slots".to_owned(), serde_json::json!(params.config.n_slots))].into();
            let (notes, environment) = (report.notes.clone(), report.environment.clone());
            let rows = rows_of(&report, &setting);
            sweep::write(path, &Rows { version: ROWS_VERSION, environment, notes, rows }.to_json())?;
        }
        if let Some(path) = &self.cost {
            let cost = report.cost.as_ref();
            let cost = cost.ok_or_else(|| CliError::input("--cost needs decode steps of several sizes, whose experts are counted: offer more load with --concurrency or \
                     --rate, or measure with --fit"))?;
            write(path, &toml::to_string(cost).map_err(CliError::failed)?)?;
        }
        output.text(&table::table(&report))?;
        output.json(&report)?;
        self.write(&report, output)
    }

    fn params(&self) -> Result<BenchParams, CliError> {
        let config = self.config()?;
        usage::at_least_one("--max-tokens", Some(self.max_tokens))?;
        usage::at_least_one("--output-tokens", self.output_tokens)?;
        usage::at_least_one("--requests", self.requests)?;
        usage::at_least_one("--concurrency", self.concurrency)?;
        usage::at_least_one("--repeats", self.repeats)?;
        usage::at_most("--repeats", self.repeats, MOST_REPEATS)?;
        usage::at_most("--requests", self.requests, MOST_REQUESTS)?;
        usage::must("--warmup", Some(self.warmup), |share| (0.0..1.0).contains(&share), "0 or more and below 1")?;
        usage::temperature(Some(self.temperature))?;
        Ok(BenchParams {
            policies: self.usable_policies()?,
            model: shipped_or(self.model.model.as_ref())?,
            workload: self.workload.clone(),
            clock: self.clock,
            arrivals: self.arrivals()?,
            concurrency: self.concurrency,
            max_prompt: self.max_prompt,
            n_requests: self.requests,
            seed: self.seed,
            temperature: self.temperature,
            default_max_tokens: self.max_tokens,
            output_tokens: self.output_tokens,
            warmup: self.warmup,
            count_experts: !self.no_count.unwrap_or(false),
            charge: self.charge.as_deref().map(read_cost).transpose()?,
            config,
        })
    }

    fn config(&self) -> Result<EngineConfig, CliError> {
        let n_decode = calibrated_workers(&self.workers, &self.route)?.unwrap_or(N_DECODE);
        let exact = !self.no_exact.unwrap_or(false);
        // A workload that goes round would be served from memory: prefixes are kept only when asked for.
        let prefix_cache = PrefixBudget::Off;
        let decode = WorkerList::best(n_decode);
        let mut config = EngineConfig { decode, exact, prefix_cache, ..EngineConfig::default() };
        self.model.configure(&mut config);
        self.workers.configure(&mut config);
        // Whatever policies are compared, a refit is asked for by name.
        self.route.configure(&mut config, Some(PolicyKind::MarginalCost));
        config.check().map_err(|problems| CliError::problems(Kind::Usage, &problems))?;
        Ok(config)
    }

    /// `all` leaves out what can not run; what was named must run.
    fn usable_policies(&self) -> Result<Vec<PolicyKind>, CliError> {
        let mut kinds = self.policies.kinds.clone();
        let lacks_calibration = |kind: &PolicyKind| kind.needs_calibration() && self.route.calibration.is_none();
        if let Some(kind) = kinds.iter().copied().find(lacks_calibration) {
            let advice = "make a calibration with `eldr calibrate` and give it with --calibration";
            if !self.policies.all {
                return Err(CliError::usage(format!("policy {kind} needs a calibration: {advice}")));
            }
            // A fit routes nothing.
            if self.fit.is_none() {
                note(&format!("policy {kind} is left out: {advice}"));
            }
            kinds.retain(|kind| !lacks_calibration(kind));
        }
        Ok(kinds)
    }

    /// Leaves the oracle out where the workload has no labels, or refuses if it was asked for by name.
    fn check_labels(&self, kinds: &mut Vec<PolicyKind>) -> Result<(), CliError> {
        let items = workload::read(&self.workload).map_err(CliError::input)?;
        if !kinds.contains(&PolicyKind::Domain) || !workload::domains(&items).is_empty() {
            return Ok(());
        }
        let why = "no line of the workload has a \"domain\"";
        if !self.policies.all {
            return Err(CliError::input(format!("policy domain goes by labels, and {why}: add them, or leave it out")));
        }
        note(&format!("policy domain is left out: {why}"));
        kinds.retain(|&kind| kind != PolicyKind::Domain);
        Ok(())
    }

    fn arrivals(&self) -> Result<Arrivals, CliError> {
        let arrivals = match (self.rate, self.burst) {
            (None, None) => Arrivals::Saturating,
            (Some(rate), None) => Arrivals::Poisson { rate },
            (Some(rate), Some((on, off))) => Arrivals::Bursts { rate, on, off },
            (None, Some(_)) => return Err(CliError::usage("--burst needs --rate, the average of requests a second")),
        };
        let flag = if self.burst.is_some() { "--rate or --burst" } else { "--rate" };
        arrivals.check().map_err(|error| CliError::usage(format!("{flag}: {error}")))?;
        Ok(arrivals)
    }

    /// The file the report is written to, if it is one.
    fn json_file(&self) -> Option<&Path> {
        self.json.as_deref().filter(|_| !self.json_to_stdout())
    }

    /// The files it writes, each with its option.
    pub fn outputs(&self) -> Vec<(&'static str, &Path)> {
        let others = [("--svg", &self.svg), ("--rows", &self.rows), ("--fit", &self.fit), ("--cost", &self.cost)];
        let others = others.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?)));
        self.json_file().map(|path| ("--json", path)).into_iter().chain(others).collect()
    }

    /// Refuses outputs before the bench rather than after it.
    fn check_outputs(&self, model: &Path) -> Result<(), CliError> {
        let inputs: Vec<&Path> = [model, &self.workload].into_iter().chain(self.route.calibration.as_deref()).collect();
        for (_, path) in self.outputs() {
            check_output(path, &inputs).map_err(CliError::usage)?;
        }
        Ok(())
    }

    /// Both files are tried, whatever becomes of the first.
    fn write(&self, report: &BenchReport, output: &mut Output) -> Result<(), CliError> {
        let json = self.json_file().map(|path| {
            let mut text = serde_json::to_string_pretty(report).map_err(CliError::failed)?;
            text.push('\n');
            write(path, &text).map(|()| path)
        });
        let svg = self.svg.as_deref().map(|path| {
            let text = chart::svg(report).map_err(CliError::failed)?;
            write(path, &text).map(|()| path)
        });
        let both = [json, svg].into_iter().flatten();
        let (written, failed): (Vec<_>, Vec<_>) = both.partition(Result::is_ok);
        for path in written.into_iter().flatten() {
            output.line(&format!("wrote {}", path.display()))?;
        }
        let failed: Vec<String> = failed.into_iter().filter_map(|result| Some(result.err()?.message)).collect();
        if failed.is_empty() { Ok(()) } else { Err(CliError::failed(failed.join("; "))) }
    }
}

/// Writes a report whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), CliError> {
    replace_file(path, text.as_bytes())
        .map_err(|error| CliError::failed(format!("cannot write {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn args(flags: &str) -> BenchArgs {
        let flags = format!("eldr --workload w.jsonl {flags}");
        Alone::try_parse_from(flags.split_whitespace()).unwrap_or_else(|error| panic!("{error}")).args
    }

    #[test]
    fn flags_become_parameters() {
        let args = args(
            "-m m.gguf --policies random,least_loaded --clock real --rate 5 --burst 2,3 --requests 9 --seed 4 \
             --no-count --decode 3@cpu --prefill 2 --slots 5 --max-tokens 7 --temperature 0 --warmup 0.25",
        );
        let params = args.params().expect("valid");
        assert_eq!(params.policies, [PolicyKind::Random, PolicyKind::LeastLoaded]);
        assert_eq!((params.clock, params.arrivals), (Clock::Real, Arrivals::Bursts { rate: 5.0, on: 2.0, off: 3.0 }));
        assert_eq!((params.n_requests, params.seed, params.default_max_tokens), (Some(9), 4, 7));
        assert!(!params.count_experts);
        assert_eq!((params.config.decode.to_string(), params.config.n_slots), ("3@cpu".to_owned(), 5));
    }

    #[test]
    fn all_policies_without_a_calibration_are_those_that_need_none() {
        let kinds = args("-m m.gguf").params().expect("valid").policies;
        assert!(!kinds.is_empty() && kinds.iter().all(|kind| !kind.needs_calibration()), "{kinds:?}");
        let error = args("-m m.gguf --policies locality_band").params().expect_err("named, so it must run");
        assert!(error.message.contains("needs a calibration"), "{}", error.message);
    }

    #[test]
    fn what_can_not_be_measured_is_refused_before_the_model_is_loaded() {
        for (flags, want) in [
            ("--burst 1,2", "--burst needs --rate"),
            ("--requests 0", "--requests"),
            ("--warmup 1", "--warmup"),
            ("--max-tokens 0", "--max-tokens"),
            ("--temperature -1", "--temperature is -1, which must be a finite number, 0 or more"),
            ("--temperature nan", "--temperature is NaN"),
            ("--concurrency 0", "--concurrency is 0, which must be at least 1"),
            ("--output-tokens 0", "--output-tokens is 0"),
            ("--rate 0", "--rate: the rate is 0 requests a second, which must be a finite number above 0"),
            ("--rate inf", "--rate: the rate is inf"),
            ("--slots 0", "slots"),
            // Symptom: a typing error ran for ever, or ended the process for want of memory.
            ("--repeats 4000000000", "--repeats is 4000000000, which must be at most 1000"),
            ("--requests 18446744073709551615", "--requests is 18446744073709551615, which must be at most 1000000"),
            ("--cache-ram 17592186044416 --prefix-cache on", "cache memory must be at most"),
            ("--max-handoffs 18446744073709551615", "hand-offs that wait must be at most"),
        ] {
            let flags = flags.replacen(" -1", "=-1", 1);
            let error = args(&format!("-m m.gguf {flags}")).params().expect_err(want);
            assert!(error.message.contains(want), "{flags}: {}", error.message);
        }
    }

    // Symptom: the last run of a sweep began after hours and was refused, or was to have a billion workers.
    #[test]
    fn a_sweep_with_a_run_that_can_not_start_is_refused_at_the_start() {
        let refused = |flags: &str| {
            let args = args(&format!("-m m.gguf {flags}"));
            let checked = sweep::check(&args.sweep, &args.params().expect("valid"));
            checked.err().map(|error| error.message)
        };
        assert_eq!(refused("--sweep slots=4,8 --sweep workers=1,2"), None);
        assert!(
            refused("--sweep slots=4,1000").expect("refused").contains("slots must be between 1 and 255, not 1000")
        );
        assert!(refused("--sweep workers=2,1e9").expect("refused").contains("at most 1024"));
    }

    #[test]
    fn the_report_goes_to_standard_output_only_when_asked() {
        assert!(args("--json").json_to_stdout() && args("--json -").json_to_stdout());
        assert!(!args("--json out.json").json_to_stdout() && !args("").json_to_stdout());
    }
}
