//! Files that say what a device's steps take, and TOML files in general.
//!
//! Never guesses a cost: what is not in the file is an error.

use std::{fs, path::Path};

use eldr::{sim::DeviceCost, types::shown};
use serde::de::DeserializeOwned;

use super::error::CliError;

/// Reads a file that `eldr bench --fit` wrote, or one like it.
pub fn read_cost(path: &Path) -> Result<DeviceCost, CliError> {
    let mut cost: DeviceCost = toml(path, "cost")?;
    if cost.source.trim().is_empty() {
        cost.source = format!("from the file {}", path.display());
    }
    match cost.problem() {
        Some(problem) => Err(CliError::input(format!("{}: {problem}", path.display()))),
        None => Ok(cost),
    }
}

/// Reads a TOML file; what is wrong is told with its place.
pub fn toml<T: DeserializeOwned>(path: &Path, what: &str) -> Result<T, CliError> {
    let text = fs::read_to_string(path)
        .map_err(|error| CliError::input(format!("cannot read the {what} {}: {error}", path.display())))?;
    if text.trim().is_empty() {
        return Err(CliError::input(format!("the {what} {} is empty: was it cut?", path.display())));
    }
    ::toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        CliError::input(format!(
            "{}, line {line}: {}",
            path.display(),
            said(error.message(), text.lines().nth(line - 1))
        ))
    })
}

/// What is wrong in a line, as one sentence.
fn said(message: &str, line: Option<&str>) -> String {
    if message == "invalid type: map, expected a sequence" {
        let header = line.and_then(|line| line.trim().strip_prefix('['));
        let name = header.and_then(|header| header.split(']').next()).map_or("..", str::trim);
        return format!(
            "there is one table where there may be several: write [[{name}]] above each, instead of [{name}]"
        );
    }
    // What is quoted is cut, and the list of what may stand there is not.
    match message.split_once(", expected one of ") {
        Some((wrong, known)) if wrong.starts_with("unknown variant ") => {
            format!("{}, expected one of {known}", shown(wrong))
        }
        _ => shown(message),
    }
}
