//! Whether the buffer types that ggml leaves to the caller, AMX among them, run on this machine.
//!
//! Never runs them in this process, which a fault would end.

use std::{
    env,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::findings::Findings;
use crate::cli::model;

/// Runs the shipped model with the extra buffer types in a process of its own, which a faulting AMX would kill.
pub fn extra_bufts(findings: &mut Findings) {
    let (Ok(program), Some(model)) = (env::current_exe(), model::shipped()) else {
        findings
            .warn("extra buffer types were not tried, because the shipped model was not found", "run from the project");
        return;
    };
    match probe(&program, &model) {
        Ok(()) => findings.ok("extra buffer types (repacking, AMX) work here: --extra-bufts may be faster"),
        Err(error) => findings.warn(
            format!("extra buffer types (repacking, AMX) do not work here ({error})"),
            "leave --extra-bufts off, as it is by default",
        ),
    }
}

const PROBE_LIMIT: Duration = Duration::from_secs(60);

fn probe(program: &Path, model: &Path) -> Result<(), String> {
    let ours = env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("ELDR_"));
    let mut command = Command::new(program);
    for name in ours {
        command.env_remove(name);
    }
    let flags = ["--extra-bufts", "--prefill", "1@cpu", "--decode", "1@cpu", "--ctx", "64", "-t", "1", "-n", "4"];
    let mut child = command
        .arg("run")
        .arg("-m")
        .arg(model)
        .args(flags)
        .args(["--ignore-eos", "The doctor asks"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let started = Instant::now();
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(status.to_string()),
            None if started.elapsed() > PROBE_LIMIT => {
                // Gone already, perhaps; then there is nothing to end.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer in {} seconds", PROBE_LIMIT.as_secs()));
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    }
}
