//! `eldr simulate`: a recording served by any number of workers under any policy, on a device's costs.
//!
//! Never runs a model; the same files, options and seeds give the same bytes.

mod jobs;
mod sources;

use std::path::{Path, PathBuf};

use clap::Args;
use eldr::{
    bench::rows::{ROWS_VERSION, Row, Rows, markdown},
    engine::{check_output, replace_file},
    route::{ParsePolicyError, PolicyKind},
    sim::{Placement, Scenario},
};

use self::{
    jobs::{Job, run_all},
    sources::Sources,
};
use super::{
    args::{TauChoice, switch},
    cost::toml,
    error::CliError,
    lists::Compared,
    output::{Output, note},
    progress, usage,
};

/// Repeats beyond these narrow no interval.
const MOST_SEEDS: u32 = 1000;

#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Print one JSON document: the rows
    #[arg(long)]
    pub json: bool,
    /// The recording, from `eldr record`
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// TOML file: workers, traffic, failures; the options below outweigh it
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// TOML file of what steps take, from `eldr bench --fit`
    #[arg(long, value_name = "FILE", conflicts_with = "device")]
    cost: Option<PathBuf>,
    /// Estimate what steps take from a known device's public figures, for the model -m
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// GGUF model whose sizes --device is for; the shipped test model without it
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Calibration file; without it, one is fitted to half of the recording and the other half is served
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Centroids of the calibration that is fitted; by default one a worker, but not less than eight requests to each
    #[arg(long, value_name = "N", conflicts_with = "calibration")]
    clusters: Option<u32>,
    /// Policies to compare, or all
    #[arg(long, value_name = "NAMES", default_value = "all", value_parser = policies)]
    policies: Policies,
    /// Decode workers; several numbers are compared
    #[arg(long, value_name = "N,..")]
    workers: Option<Compared<u32>>,
    /// Sequences a decode worker holds; several numbers are compared
    #[arg(long, value_name = "N,..")]
    slots: Option<Compared<u32>>,
    /// Requests a second; several numbers are compared
    #[arg(long, value_name = "R,..")]
    rate: Option<Compared<f64>>,
    /// Requests in the system at most; several numbers are compared
    #[arg(long, value_name = "N,..")]
    concurrency: Option<Compared<u32>>,
    /// Widths of the locality band, or auto, the calibration's; several are compared
    #[arg(long, value_name = "TAU,..")]
    tau: Option<Compared<TauChoice>>,
    /// Requests of a run
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// Repeats, each with a seed of its own; with 2 to 20 there are confidence intervals
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: u32,
    /// The first seed
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// Let the centroids follow the traffic
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    refit: Option<bool>,
    /// Let the marginal cost begin with the costs that are simulated, as --step-cost does when serving; without it, it learns them
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    known_cost: Option<bool>,
    /// Run the policies that go by picks once more with those of the answers, which nobody knows in time: a bound
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    clairvoyant: Option<bool>,
    /// Run the policies with centroids once more with those of plain k-means, whose clusters have any size: an ablation
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", conflicts_with = "calibration", value_parser = switch())]
    unbalanced: Option<bool>,
    /// Each worker is a device of so many ranks that share each layer's experts: compare placements of experts
    #[arg(long, value_name = "RANKS")]
    place: Option<u32>,
    /// Write the placement there, as JSON
    #[arg(long, value_name = "OUT", requires = "place")]
    placement: Option<PathBuf>,
    /// Write the rows there, for `eldr report`
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
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

impl SimulateArgs {
    /// The files it writes, each with its option.
    pub fn outputs(&self) -> Vec<(&'static str, &Path)> {
        let all = [("--output", &self.output), ("--placement", &self.placement)];
        all.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?))).collect()
    }

    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        self.check()?;
        let scenario = self.scenario()?;
        let sources = Sources::read(self)?;
        let mut kinds = self.policies.kinds.clone();
        if sources.trace.requests.iter().all(|request| request.domain.is_none()) && kinds.contains(&PolicyKind::Domain)
        {
            let why = "the recording has no domains";
            if !self.policies.all {
                return Err(CliError::input(format!("policy domain goes by labels, and {why}: leave it out")));
            }
            note(&format!("policy domain is left out: {why}"));
            kinds.retain(|&kind| kind != PolicyKind::Domain);
        }
        self.unused(&kinds).iter().for_each(|unused| note(unused));
        if scenario.migrate_every > 0 && !kinds.iter().any(|kind| kind.uses_counts()) {
            note("migrate_every changes nothing: only marginal_cost moves running requests, and it is not compared");
        }
        progress::end_on_interrupt("nothing was written; fewer --requests or --seeds end sooner");
        let mut jobs = self.jobs(&scenario, &kinds);
        let (setups, placement) = sources.setups(self, &jobs)?;
        if placement.is_some() {
            let in_order = jobs.iter().map(|job| Job { own_placement: Some(false), ..job.clone() });
            let own = jobs.iter().map(|job| Job { own_placement: Some(true), ..job.clone() });
            jobs = in_order.chain(own).collect();
        }
        let rows = run_all(&sources, &setups, &jobs, self.refit.unwrap_or(false))?;
        let unserved = unserved(&rows)?;
        let mut notes = vec![format!("Simulated. What steps take: {}.", sources.cost.source.trim_end_matches('.'))];
        notes.extend(setups.values().filter_map(|setup| setup.note.clone()).take(1));
        notes.extend(placement.as_ref().map(judged));
        notes.extend(unserved);
        let rows = Rows { version: ROWS_VERSION, environment: None, notes, rows };
        if let (Some(path), Some(placement)) = (&self.placement, &placement) {
            let text = serde_json::to_string(placement).map_err(CliError::failed)?;
            write(path, &(text + "\n"))?;
        }
        if let Some(path) = &self.output {
            write(path, &rows.to_json())?;
        }
        output.text(&markdown(&rows))?;
        output.json(&rows)
    }

    fn check(&self) -> Result<(), CliError> {
        let at_least = |flag: &str, zero: bool| {
            if zero { Err(CliError::usage(format!("{flag} is 0, which must be at least 1"))) } else { Ok(()) }
        };
        at_least("--seeds", self.seeds == 0)?;
        usage::at_most("--seeds", Some(self.seeds), MOST_SEEDS)?;
        at_least("--place", self.place == Some(0))?;
        at_least("--clusters", self.clusters == Some(0))?;
        if self.cost.is_none() && self.device.is_none() {
            return Err(CliError::usage(
                "what steps take is not known: measure it with `eldr bench --fit` and give the file with --cost, or \
                 estimate it with --device"
                    .to_owned(),
            ));
        }
        let inputs = [Some(&self.trace), self.scenario.as_ref(), self.cost.as_ref(), self.calibration.as_ref()];
        let inputs: Vec<&Path> = inputs.into_iter().flatten().map(PathBuf::as_path).collect();
        for (_, path) in self.outputs() {
            check_output(path, &inputs).map_err(CliError::usage)?;
        }
        Ok(())
    }

    /// What was asked for and changes nothing under the policies that are compared, each in a sentence.
    fn unused(&self, kinds: &[PolicyKind]) -> Vec<String> {
        let asked = |given: Option<bool>| given.unwrap_or(false);
        let compares = kinds.iter().any(|kind| kind.uses_centroids());
        let has_band = kinds.contains(&PolicyKind::LocalityBand);
        let centroids = "no policy that is compared goes by centroids";
        let vain = [
            ("--tau", self.tau.is_some() && !has_band, "only locality_band has a band, and it is not compared"),
            ("--refit", asked(self.refit) && !compares, centroids),
            ("--clairvoyant", asked(self.clairvoyant) && !compares, centroids),
            ("--unbalanced", asked(self.unbalanced) && !compares, centroids),
            ("--clusters", self.clusters.is_some() && !compares && self.place.is_none(), centroids),
            ("--calibration", self.calibration.is_some() && !compares && self.place.is_none(), centroids),
            ("--model", self.model.is_some() && self.device.is_none(), "it is for the sizes that --device asks for"),
        ];
        let vain = vain.into_iter().filter(|&(_, is_vain, _)| is_vain);
        vain.map(|(option, _, why)| format!("{option} changes nothing: {why}")).collect()
    }

    fn scenario(&self) -> Result<Scenario, CliError> {
        let mut scenario = match &self.scenario {
            Some(path) => toml::<Scenario>(path, "scenario")?,
            None => Scenario::default(),
        };
        scenario.requests = self.requests.unwrap_or(scenario.requests);
        scenario.seed = self.seed.unwrap_or(scenario.seed);
        Ok(scenario)
    }

    /// Every combination of what is compared.
    fn jobs(&self, scenario: &Scenario, kinds: &[PolicyKind]) -> Vec<Job> {
        let mut scenarios = vec![scenario.clone()];
        scenarios = vary(&scenarios, self.workers.as_ref(), |scenario, workers| {
            scenario.decode.truncate(1);
            scenario.decode.iter_mut().for_each(|group| group.workers = workers);
        });
        scenarios = vary(&scenarios, self.slots.as_ref(), |scenario, slots| {
            scenario.decode.iter_mut().for_each(|group| group.slots = slots);
        });
        scenarios = vary(&scenarios, self.rate.as_ref(), |scenario, rate| scenario.rate = Some(rate));
        scenarios = vary(&scenarios, self.concurrency.as_ref(), |scenario, n| scenario.concurrency = Some(n));
        let each =
            |scenario: &Scenario| -> Vec<Job> { kinds.iter().flat_map(|&kind| self.of_kind(scenario, kind)).collect() };
        scenarios.iter().flat_map(each).collect()
    }

    /// The band in each width, what goes by picks perhaps with those of the answers, and all with each seed.
    fn of_kind(&self, scenario: &Scenario, kind: PolicyKind) -> Vec<Job> {
        let taus = self.tau.as_ref().filter(|_| kind == PolicyKind::LocalityBand);
        let taus = taus.map_or(vec![None], |many| many.values().map(TauChoice::fixed).collect());
        let asks = |given: Option<bool>| kind.uses_centroids() && given.unwrap_or(false);
        // As it is, then with each change by itself.
        let mut variants = vec![(false, false)];
        variants.extend(asks(self.clairvoyant).then_some((true, false)));
        variants.extend(asks(self.unbalanced).then_some((false, true)));
        let seeds = 0..u64::from(self.seeds);
        let mut jobs = Vec::new();
        for tau in taus {
            for &(clairvoyant, unbalanced) in &variants {
                jobs.extend(seeds.clone().map(|nth| {
                    let scenario = Scenario { seed: scenario.seed.wrapping_add(nth), ..scenario.clone() };
                    Job { scenario, kind, tau, own_placement: None, clairvoyant, unbalanced }
                }));
            }
        }
        jobs
    }
}

/// Each scenario with each of the values, where there are any.
fn vary<T: Copy>(
    scenarios: &[Scenario],
    values: Option<&Compared<T>>,
    set: impl Fn(&mut Scenario, T),
) -> Vec<Scenario> {
    let Some(values) = values else { return scenarios.to_vec() };
    let with = |scenario: &Scenario, value: T| {
        let mut scenario = scenario.clone();
        set(&mut scenario, value);
        scenario
    };
    scenarios
        .iter()
        .flat_map(|scenario| values.values().map(|value| with(scenario, value)).collect::<Vec<_>>())
        .collect()
}

/// A sentence where some requests were refused or failed; an error where a run measured none, which would look like a result.
fn unserved(rows: &[Row]) -> Result<Option<String>, CliError> {
    let number = |row: &Row, name: &str| row.measured.get(name).copied().unwrap_or(0.0);
    let lost = |row: &Row| number(row, "refused") + number(row, "failed");
    if let Some(row) = rows.iter().find(|row| !row.measured.contains_key("tpot_p50_ms")) {
        return Err(CliError::failed(format!(
            "{} measured no request: {} finished, {} were refused and {} failed, so nothing was written; offer less, let more \
             wait (max_queue), keep a worker, or give more --requests",
            row.setting.get("policy").and_then(serde_json::Value::as_str).unwrap_or("a run"),
            number(row, "finished"),
            number(row, "refused"),
            number(row, "failed"),
        )));
    }
    let worst = rows.iter().map(lost).fold(0.0, f64::max);
    Ok((worst > 0.0).then(|| format!("Up to {worst} requests of a run were refused or failed; they have no times.")))
}

fn judged(placement: &Placement) -> String {
    let judged = placement.judged;
    format!(
        "Experts of the busiest of {} ranks, summed over the layers, in batches that no placement was made for: {:.1} in \
         the order of their numbers, {:.1} in one placement for all, {:.1} in each cluster's own; {:.1} would be even.",
        placement.n_ranks, judged.in_order, judged.shared, judged.own, judged.even
    )
}

/// Writes a file whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), CliError> {
    replace_file(path, text.as_bytes())
        .map_err(|error| CliError::failed(format!("cannot write {}: {error}", path.display())))
}
