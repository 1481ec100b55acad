//! What is simulated: the recording, the costs, the calibrations, the placements.
//!
//! Never simulates anything.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

use eldr::{
    calibrate::{Calibration, CalibrationInput, CalibrationParams, ExpertRanks, fit},
    engine::{EngineConfig, EngineError, KvFormat, LoadedModel, read_calibration, read_trace},
    sim::{DeviceCost, PRESETS, Placement, PlacingParams, Preset, PresetModel, ReplaySet, place_experts},
    trace::Trace,
    types::shown,
};

use super::{SimulateArgs, jobs::Job};
use crate::cli::{cost::read_cost, error::CliError, model::shipped_or};

/// Requests a fitted centroid stands for at least.
const REQUESTS_A_CLUSTER: usize = 8;

/// What every run has in common.
pub struct Sources {
    pub trace: Trace,
    pub set: ReplaySet,
    pub cost: DeviceCost,
    /// The marginal cost begins with it.
    pub known_cost: bool,
    /// Positions of the requests that are served.
    pub served: Vec<usize>,
    /// Positions that a calibration is fitted to; none where one was given or is not needed.
    fitted: Vec<usize>,
    given: Option<Arc<Calibration>>,
}

/// What runs need the same setup for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SetupKey {
    pub n_workers: usize,
    /// Clusters have any sizes.
    pub unbalanced: bool,
}

/// What the runs with one number of workers have in common.
pub struct Setup {
    pub calibration: Option<Arc<Calibration>>,
    /// Where each cluster's experts are, and where they are by number.
    pub own: Vec<Arc<ExpertRanks>>,
    pub in_order: Vec<Arc<ExpertRanks>>,
    /// What a reader must know.
    pub note: Option<String>,
}

impl Sources {
    pub fn read(args: &SimulateArgs) -> Result<Self, CliError> {
        let trace = read_trace(&args.trace)?;
        let set = ReplaySet::new(&trace);
        let usable: Vec<usize> = (0..set.n_requests()).filter(|&at| set.n_steps(at) > 0).collect();
        if usable.len() < 2 {
            return Err(CliError::input(format!(
                "{}: {} requests with two or more generated tokens are too few to serve: record more",
                args.trace.display(),
                usable.len()
            )));
        }
        let given = match &args.calibration {
            Some(path) => {
                let calibration = read_calibration(path).map_err(EngineError::from)?;
                if calibration.fingerprint != trace.header.fingerprint {
                    return Err(CliError::input(format!(
                        "{} was made for another model than {} was recorded on: give that model's",
                        path.display(),
                        args.trace.display()
                    )));
                }
                Some(Arc::new(calibration))
            }
            None => None,
        };
        let needs = args.place.is_some() || args.policies.kinds.iter().any(|kind| kind.uses_centroids());
        let half = |odd: usize| usable.iter().copied().skip(odd).step_by(2).collect::<Vec<_>>();
        let (fitted, served) = if given.is_none() && needs { (half(0), half(1)) } else { (Vec::new(), usable) };
        Ok(Self { cost: cost(args)?, known_cost: args.known_cost.unwrap_or(false), trace, set, served, fitted, given })
    }

    /// One setup for each key, and the placement of the first, where one is wanted.
    pub fn setups(
        &self,
        args: &SimulateArgs,
        jobs: &[Job],
    ) -> Result<(BTreeMap<SetupKey, Setup>, Option<Placement>), CliError> {
        let mut setups = BTreeMap::new();
        let mut placement = None;
        for job in jobs {
            if let Entry::Vacant(place) = setups.entry(job.setup()) {
                let (setup, placed) = self.setup(args, job.setup())?;
                placement = placement.or(placed);
                place.insert(setup);
            }
        }
        Ok((setups, placement))
    }

    fn setup(&self, args: &SimulateArgs, key: SetupKey) -> Result<(Setup, Option<Placement>), CliError> {
        let SetupKey { n_workers, unbalanced } = key;
        let (calibration, note) = match &self.given {
            Some(calibration) => (Some(Arc::clone(calibration)), shared(calibration.n_workers(), n_workers)),
            None if self.fitted.is_empty() => (None, None),
            None => {
                let most = (self.fitted.len() / REQUESTS_A_CLUSTER).max(1);
                let n_clusters = args.clusters.map_or(n_workers.min(most), |n| n as usize);
                let input = CalibrationInput::of_trace(&self.trace, self.fitted.iter().copied());
                let params = CalibrationParams { unbalanced, ..CalibrationParams::new(n_clusters) };
                let fitted = fit(&input, &params);
                let (calibration, _) =
                    fitted.map_err(|error| CliError::input(format!("{}: {error}", args.trace.display())))?;
                let note = format!(
                    "Calibrated on {} requests of the recording, served are {} others; {n_clusters} centroids for \
                     {n_workers} workers.",
                    self.fitted.len(),
                    self.served.len()
                );
                (Some(Arc::new(calibration)), Some(note))
            }
        };
        let mut setup = Setup { calibration, own: Vec::new(), in_order: Vec::new(), note };
        let (Some(n_ranks), Some(calibration)) = (args.place, &setup.calibration) else { return Ok((setup, None)) };
        let shape = &self.trace.header.shape;
        if n_ranks > shape.n_expert {
            return Err(CliError::usage(format!(
                "--place is {n_ranks}, and a layer has {} experts to share",
                shape.n_expert
            )));
        }
        let placement = place_experts(&self.trace, &self.set, calibration, &PlacingParams::new(n_ranks));
        let own = placement.ranks().map_err(CliError::failed)?;
        let per_rank = shape.n_expert.div_ceil(n_ranks);
        let layer: Vec<u32> = (0..shape.n_expert).map(|expert| expert / per_rank).collect();
        let in_order = ExpertRanks::new(&vec![layer; shape.n_layer_moe()], n_ranks).map_err(CliError::failed)?;
        setup.own = own.into_iter().map(Arc::new).collect();
        setup.in_order = vec![Arc::new(in_order)];
        Ok((setup, Some(placement)))
    }
}

fn shared(n_centroids: usize, n_workers: usize) -> Option<String> {
    (n_centroids != n_workers)
        .then(|| format!("The calibration's {n_centroids} centroids are given to the {n_workers} workers in turn."))
}

fn cost(args: &SimulateArgs) -> Result<DeviceCost, CliError> {
    if let Some(path) = &args.cost {
        return read_cost(path);
    }
    let name = args.device.as_deref().unwrap_or_default();
    let preset = Preset::named(name).ok_or_else(|| {
        let known: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        CliError::usage(format!("--device '{}' is not known; known are {}", shown(name), known.join(", ")))
    })?;
    let loaded = LoadedModel::load(&shipped_or(args.model.as_ref())?, &EngineConfig::default())?;
    let facts = loaded.facts();
    let (Some(experts), Some(shape)) = (facts.experts, &facts.moe) else {
        return Err(CliError::input("the model is dense: there are no experts to simulate".to_owned()));
    };
    let active =
        experts.dense as f64 + experts.expert as f64 * f64::from(shape.n_expert_used) * shape.n_layer_moe() as f64;
    Ok(preset.cost(&PresetModel {
        expert_bytes: experts.expert as f64,
        dense_bytes: experts.dense as f64,
        kv_bytes: loaded.kv_bytes_per_token(KvFormat::F16) as f64,
        active_params: facts.n_params as f64 * active / facts.size_bytes.max(1) as f64,
        n_layer: f64::from(facts.n_layer),
    }))
}
