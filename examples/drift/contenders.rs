//! Who is compared.

use eldr::{
    refit::RefitConfig,
    route::{MarginalCostParams, PolicyKind},
};

/// A policy with its settings.
#[derive(Debug, Clone)]
pub struct Contender {
    pub name: String,
    pub kind: PolicyKind,
    pub tau: f32,
    /// It has the calibration's centroids, and whether they follow the traffic.
    pub calibrated: bool,
    pub refit: Option<RefitConfig>,
    pub params: MarginalCostParams,
    /// A sequence may move once in so many decode steps; none does if 0.
    pub migrate_every: u32,
    /// It is told what every request will pick.
    pub knows: bool,
    /// It is what `--policy auto` is, where there is a calibration.
    pub is_default: bool,
}

impl Contender {
    fn new(name: &str, kind: PolicyKind) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            tau: 0.1,
            calibrated: kind.needs_calibration(),
            refit: None,
            params: MarginalCostParams::default(),
            migrate_every: 0,
            knows: false,
            is_default: false,
        }
    }

    fn band(tau: f32) -> Self {
        Self { tau, ..Self::new(&format!("band {tau}"), PolicyKind::LocalityBand) }
    }

    fn default_policy(name: &str) -> Self {
        let refit = Some(RefitConfig::default());
        Self { calibrated: true, refit, ..Self::new(name, PolicyKind::MarginalCost) }
    }
}

/// The load balancers first.
pub fn all() -> Vec<Contender> {
    let marginal = |name: &str| Contender::new(name, PolicyKind::MarginalCost);
    let mut contenders: Vec<Contender> = balancers();
    contenders.extend([0.0, 0.05, 0.1, 0.2, 0.4].map(Contender::band));
    contenders.push(marginal("marginal"));
    contenders.push(Contender { calibrated: true, ..marginal("marginal +centroids") });
    contenders.push(Contender { is_default: true, ..Contender::default_policy("marginal +refit") });
    contenders.push(Contender { migrate_every: 8, ..Contender::default_policy("marginal +moves") });
    let nothing_usual = MarginalCostParams { prior_tokens: 0.01, ..MarginalCostParams::default() };
    contenders.push(Contender { knows: true, params: nothing_usual, ..Contender::default_policy("clairvoyant") });
    contenders
}

fn balancers() -> Vec<Contender> {
    let kinds = [PolicyKind::RoundRobin, PolicyKind::LeastLoaded, PolicyKind::PowerOfTwo, PolicyKind::Random];
    kinds.map(|kind| Contender::new(kind.name(), kind)).to_vec()
}

/// One setting of the default policy and what else it could be; the name of its chart.
pub type Ablation = (&'static str, Vec<Contender>);

/// The load balancers and the default policy, which every ablation is compared with.
pub fn unchanged() -> Vec<Contender> {
    let mut contenders = balancers();
    contenders.push(Contender { is_default: true, ..Contender::default_policy("default") });
    contenders
}

/// The default policy, one setting changed at a time.
pub fn ablations() -> Vec<Ablation> {
    let vary = |name: String, change: &dyn Fn(&mut Contender)| {
        let mut contender = Contender::default_policy(&name);
        change(&mut contender);
        contender
    };
    let lambda = |lambda| vary(format!("lambda {lambda}"), &|contender| contender.params.lambda = lambda);
    let a = |tokens| vary(format!("a {tokens}"), &|contender| contender.params.prior_tokens = tokens);
    let pull = |pull| vary(format!("pull {pull}"), &|contender| contender.params.pull = pull);
    let feedback = |every| vary(format!("feedback {every}"), &|contender| contender.params.feedback = every);
    let migrate = |every| vary(format!("migrate {every}"), &|contender| contender.migrate_every = every);
    let window = |max_signatures| {
        let refit = RefitConfig { max_signatures, ..RefitConfig::default() };
        vary(format!("window {max_signatures}"), &|contender| contender.refit = Some(refit.clone()))
    };
    let no_refit = vary("refit off".to_owned(), &|contender| contender.refit = None);
    let no_centroids = Contender { calibrated: false, refit: None, ..Contender::default_policy("centroids off") };
    vec![
        ("lambda", [0.0, 0.2, 0.4, 1.6].map(lambda).to_vec()),
        ("a", [0.5, 8.0, 32.0].map(a).to_vec()),
        ("pull", [1.0, 2.0, 3.0].map(pull).to_vec()),
        ("window", [128, 256, 512, 2048].map(window).to_vec()),
        ("refit", vec![no_refit, no_centroids]),
        ("feedback", [64, 16, 4].map(feedback).to_vec()),
        ("migration", [128, 32, 8].map(migrate).to_vec()),
    ]
}
