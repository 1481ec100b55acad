//! What a device computes, checked against the CPU and timed: one JSON document on standard output, which
//! `tests/gpu/run.sh` makes a page of.
//!
//! Never judges a time: checks are of counts, tokens and logits.
//!
//! Usage: `cargo bench --bench device -- DEVICE [small|full] [MODEL] [CALIBRATION]`. MODEL is for the times only, such as
//! an inflated copy of the shipped one, and CALIBRATION is of four workers and the shipped model.
#![expect(clippy::print_stdout, reason = "it is the result")]

#[path = "../support/mod.rs"]
mod support;

mod experts;
mod memory;
mod moves;
mod picks;
mod policies;
mod rig;
mod steps;
mod wide;

use std::{env, error::Error, path::PathBuf};

use serde_json::{Value, json};

use rig::{Rig, Size};

/// What a part found: a sentence for its check, or why the check failed, and what it measured.
type Found = Result<(String, Value), Box<dyn Error>>;
type Part = fn(&Rig) -> Found;

const PARTS: [(&str, Part); 10] = [
    ("planted models: the picks are the known ones", picks::planted),
    ("trained model: the counts are the CPU's", picks::trained),
    ("a hand-off between contexts of the device changes nothing", moves::within),
    ("a hand-off from the device to the CPU keeps the prompt", moves::to_cpu),
    ("a hand-off from the CPU to the device keeps the prompt", moves::from_cpu),
    ("the tap in prefill reads every pick", steps::prefill),
    ("decode steps with and without a tap", steps::decode),
    ("batches of known picks use as many experts as planted", experts::steps),
    ("greedy outputs under each policy are whole", policies::greedy),
    ("workers take the memory that was foreseen", memory::workers),
];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let at = |index: usize| args.get(index).map(String::as_str).filter(|arg| !arg.is_empty());
    let device = at(0).ok_or("name a device, such as cpu or cuda:0")?;
    let size = match at(1).unwrap_or("small") {
        "small" => Size::Small,
        "full" => Size::Full,
        other => return Err(format!("the size is small or full, not '{other}'").into()),
    };
    let rig = Rig::open(device, size, at(2).map(PathBuf::from), at(3).map(PathBuf::from))?;
    let mut parts = Vec::new();
    for (name, part) in PARTS {
        eprintln!("{name}");
        // Also said here, for a driver may end the process before the document is written.
        parts.push(match part(&rig) {
            Ok((found, measured)) => {
                eprintln!("    {found}");
                json!({ "check": name, "ok": true, "found": found, "measured": measured })
            }
            Err(why) => {
                eprintln!("    failed: {why}");
                json!({ "check": name, "ok": false, "found": why.to_string(), "measured": null })
            }
        });
    }
    println!("{:#}", json!({ "device": rig.description(), "size": size.name(), "parts": parts }));
    Ok(())
}
