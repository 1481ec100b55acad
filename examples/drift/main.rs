//! The policies on traffic that is as calibrated, that is not, that changes, and on workers that differ, slow down, are
//! lost and join: what each gains, how much a router that knew every pick would, and how much there is to gain at all.
//!
//! `cargo run --release --example drift -- task.trace out 8` replays a trace with domains (`eldr record`) over 8 decode
//! workers and writes out.json (one row a scenario and policy), out.svg, and out-admission.svg (one worker and a queue). A
//! fourth argument is the number of seeds. With a fifth, `ablations`, it varies the default policy's settings instead and
//! writes a chart of each: out-lambda.svg, -a, -pull, -window, -refit, -feedback, -migration.
#![expect(clippy::print_stdout, reason = "it prints tables")]

mod bound;
mod cases;
mod chart;
mod clairvoyant;
mod contenders;
mod overtaking;
mod partition;
mod recovery;
mod rows;

use std::{error::Error, fs, path::Path};

use cases::{Case, World};
use chart::Mark;
use contenders::Contender;
use eldr::engine::read_trace;
use rows::Row;

/// Calibrations and orders are drawn with these; none was used to choose a setting.
const FIRST_SEED: u64 = 1001;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, trace, out, n_workers, rest @ ..] = &args[..] else {
        return Err("give a trace, where to write, and a number of decode workers".into());
    };
    let n_seeds = rest.first().map_or(Ok(8), |n| n.parse())?;
    if n_seeds < 2 {
        return Err("give 2 seeds or more: an interval is between seeds".into());
    }
    let n_workers = n_workers.parse()?;
    let world = World::new(read_trace(Path::new(trace))?, n_workers, FIRST_SEED..FIRST_SEED + n_seeds);
    let varied = if rest.get(1).is_some_and(|mode| mode == "ablations") { contenders::ablations() } else { Vec::new() };
    let cases: &[Case] = if varied.is_empty() { &Case::ALL } else { &Case::ABLATIONS };
    let contenders = if varied.is_empty() {
        contenders::all()
    } else {
        contenders::unchanged().into_iter().chain(varied.iter().flat_map(|(_, all)| all.clone())).collect()
    };
    let mut rows = Vec::new();
    for &case in cases {
        let of_case = compare(&world, case, &contenders, varied.is_empty())?;
        rows::print(&of_case);
        rows.extend(of_case);
    }
    let behind: Vec<&Row> = rows.iter().filter(|row| row.is_default && row.mean_to_round_robin.low > 0.0).collect();
    println!("the default is behind round robin in {} of {} cases", behind.len(), cases.len());
    let overtaking = overtaking::all(&world)?;
    overtaking::print(&overtaking);
    let name = Path::new(trace).file_stem().map(|name| name.to_string_lossy());
    let json = serde_json::json!({ "trace": name, "rows": rows, "overtaking": overtaking });
    fs::write(format!("{out}.json"), serde_json::to_string_pretty(&json)?)?;
    if varied.is_empty() {
        chart(&format!("{out}.svg"), &rows, |_| true)?;
    }
    for (ablation, all) in &varied {
        let is_shown = |row: &Row| row.is_default || all.iter().any(|contender| contender.name == row.policy);
        chart(&format!("{out}-{ablation}.svg"), &rows, is_shown)?;
    }
    overtaking::chart(Path::new(&format!("{out}-admission.svg")), &overtaking)
}

/// Draws the rows that are shown.
fn chart(path: &str, rows: &[Row], is_shown: impl Fn(&Row) -> bool) -> Result<(), Box<dyn Error>> {
    let titles =
        ["median of TPOT", "P99 of TPOT"].map(|what| format!("{what}, change in % against the best load balancer"));
    let marks: Vec<Mark> = rows.iter().filter(|row| is_shown(row)).map(Row::mark).collect();
    chart::draw(Path::new(path), titles.each_ref().map(String::as_str), &marks)
}

/// One row for each contender, and perhaps for each bound of what the default serves.
fn compare(world: &World, case: Case, contenders: &[Contender], bounded: bool) -> Result<Vec<Row>, Box<dyn Error>> {
    let default = contenders.iter().find(|contender| contender.is_default).filter(|_| bounded);
    let run = |seed| {
        let mut outcomes = world.serve(case, seed, contenders)?;
        if let Some(default) = default {
            outcomes.extend(world.bounds(case, seed, default)?);
        }
        Ok(outcomes)
    };
    let runs = world.seeds().map(run).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let named = contenders.iter().map(|contender| (contender.name.as_str(), contender.is_default));
    let names: Vec<(&str, bool)> = named.chain(bound::KINDS.map(|kind| (kind, false))).take(runs[0].len()).collect();
    Ok(rows::rows(case, world.n_workers, &names, &runs))
}
