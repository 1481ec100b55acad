use eldr::{
    calibrate::{Calibration, CalibrationInput, CalibrationParams, fit},
    engine::read_trace,
    refit::{RefitConfig, Refitter},
    route::*,
    sim::*,
    trace::Trace,
};
use rayon::prelude::*;
use std::{env, path::Path, sync::Arc, time::Duration};

#[derive(Clone, Debug)]
struct V {
    name: String,
    kind: PolicyKind,
    tau: f32,
    cal: bool,
    refit: bool,
    p: MarginalCostParams,
}

fn variants(which: &str) -> Vec<V> {
    let v = |name: &str, kind, cal, refit| V {
        name: name.into(),
        kind,
        tau: 0.1,
        cal,
        refit,
        p: MarginalCostParams::default(),
    };
    let mut all = vec![
        v("rr", PolicyKind::RoundRobin, false, false),
        v("jsq", PolicyKind::LeastLoaded, false, false),
        v("p2c", PolicyKind::PowerOfTwo, false, false),
    ];
    match which {
        "main" => {
            for tau in [0.0, 0.05, 0.1, 0.2, 0.3, 0.5] {
                all.push(V { tau, name: format!("band {tau}"), ..v("", PolicyKind::LocalityBand, true, false) });
            }
            all.push(V { tau: 0.1, name: "band .1 refit".into(), ..v("", PolicyKind::LocalityBand, true, true) });
            all.push(v("mc", PolicyKind::MarginalCost, false, false));
            all.push(v("mc+cent", PolicyKind::MarginalCost, true, false));
            all.push(v("mc+cent+refit", PolicyKind::MarginalCost, true, true));
        }
        "lambda" => {
            for lambda in [0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0] {
                let mut x = v(&format!("lam {lambda}"), PolicyKind::MarginalCost, true, true);
                x.p.lambda = lambda;
                all.push(x);
            }
        }
        "lambda0" => {
            for lambda in [0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0] {
                let mut x = v(&format!("lam {lambda} norefit"), PolicyKind::MarginalCost, true, false);
                x.p.lambda = lambda;
                all.push(x);
            }
        }
        "a" => {
            for a in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0] {
                let mut x = v(&format!("a {a}"), PolicyKind::MarginalCost, false, false);
                x.p.prior_tokens = a;
                all.push(x);
            }
        }
        "mc" => {
            for pull in [1.5, 2.0, 3.0] {
                for (cal, lambda) in [(false, 0.0), (true, 0.1), (true, 0.25), (true, 0.5)] {
                    let mut x = v(&format!("p{pull} l{lambda}"), PolicyKind::MarginalCost, cal, cal);
                    x.p.lambda = lambda;
                    x.p.pull = pull;
                    all.push(x);
                }
            }
        }
        _ => {}
    }
    all
}

fn one(
    trace: &Trace,
    set: &ReplaySet,
    nw: usize,
    slots: u32,
    conc: usize,
    traffic: Traffic,
    seed: u64,
    vs: &[V],
) -> Vec<ReplayReport> {
    let n = conc * 8;
    let (fit_on, served) = traffic.split(trace, 20, n, seed);
    let cal: Arc<Calibration> = Arc::new(
        fit(
            &CalibrationInput::of_trace(trace, fit_on),
            &CalibrationParams { n_workers: nw, ..CalibrationParams::new(nw) },
        )
        .unwrap()
        .0,
    );
    let mut plan = ReplayParams {
        n_slots: vec![slots; nw],
        arrivals: Arrivals::Closed { concurrency: conc, ramp: 100.0 },
        order: Order::Passing,
        n_requests: n,
        warmup: 0.2,
        prefill: 10.0,
        cost: StepCost::UNIT,
        limits: Default::default(),
    };
    let build = |v: &V| {
        v.kind
            .build(&PolicyParams {
                seed,
                tau: v.tau,
                centroids: v.cal.then(|| Arc::new(cal.centroids.clone())),
                shape: Some(trace.header.shape.clone()),
                marginal: v.p,
                ..PolicyParams::new(nw)
            })
            .unwrap()
    };
    let rr = replay(set, &served, &plan, build(&vs[0]), None).unwrap();
    plan.cost = StepCost::from_shares(CostShares::default(), &rr, set.n_layer());
    vs.iter()
        .map(|v| {
            if v.refit {
                let r = Refitter::new(RefitConfig::default(), Arc::new(cal.centroids.clone())).unwrap();
                replay_refitting(set, &served, &plan, build(v), Arc::clone(&cal), r, Duration::from_millis(30)).unwrap()
            } else {
                replay(set, &served, &plan, build(v), v.cal.then(|| Arc::clone(&cal))).unwrap()
            }
        })
        .collect()
}

fn main() {
    let args: Vec<String> = env::args().collect();
    let vs = variants(&args[2]);
    let seeds: Vec<u64> = if args[3] == "tune" { (1..=4).collect() } else { (101..=104).collect() };
    let trace = read_trace(Path::new(&args[1])).unwrap();
    let set = ReplaySet::new(&trace);
    let configs: Vec<(usize, u32, usize)> = match args.get(4).map(String::as_str) {
        Some("8") => vec![(8, 32, 128)],
        Some("16") => vec![(16, 16, 128)],
        _ => vec![(8, 32, 128), (16, 16, 128)],
    };
    for (nw, slots, conc) in configs {
        println!("== {} {nw} workers, {conc} live", args[1]);
        print!("{:<14}", "");
        for v in &vs {
            print!("{:>16}", v.name);
        }
        println!();
        let rows: Vec<_> = Traffic::ALL
            .par_iter()
            .map(|&t| {
                let conc = if t == Traffic::OneDomain { conc / 2 } else { conc };
                let runs: Vec<Vec<ReplayReport>> =
                    seeds.par_iter().map(|&s| one(&trace, &set, nw, slots, conc, t, s, &vs)).collect();
                (t, runs)
            })
            .collect();
        for (t, runs) in rows {
            let m: Vec<ReplayMeans> = (0..vs.len()).map(|i| ReplayMeans::of(runs.iter().map(|r| &r[i]))).collect();
            let rep: u64 = runs.iter().flatten().map(|r| r.n_repeats).sum();
            let b50 = m[..3].iter().map(|m| m.tpot_p50).fold(f64::MAX, f64::min);
            let b99 = m[..3].iter().map(|m| m.tpot_p99).fold(f64::MAX, f64::min);
            print!("{:<14}", format!("{}{}", t.name(), if rep > 0 { format!(" r{rep}") } else { String::new() }));
            for m in &m {
                print!(
                    "{:>16}",
                    format!(
                        "{:+.1}/{:+.1} {:.2}",
                        100.0 * (m.tpot_p50 / b50 - 1.0),
                        100.0 * (m.tpot_p99 / b99 - 1.0),
                        m.experts_per_token
                    )
                );
            }
            println!();
        }
    }
}
