//! Where words go: results to standard output, everything else to standard error.
//!
//! Never panics when a reader goes away, which is what `println!` does.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use eldr::{engine::check_output, types::visible};
use serde::Serialize;

use super::error::CliError;

/// Standard output, and whether it takes one JSON document or text.
pub struct Output {
    out: Box<dyn Write>,
    json: bool,
}

impl Output {
    /// With `json`, text is not printed: [`Output::json`] prints the verb's one document.
    pub fn new(json: bool) -> Self {
        Self { out: Box::new(io::stdout()), json }
    }

    /// Prints text as it is and does not wait for the line's end.
    pub fn text(&mut self, text: &str) -> Result<(), CliError> {
        if !self.json {
            self.out.write_all(text.as_bytes())?;
            self.out.flush()?;
        }
        Ok(())
    }

    /// Prints a line, and makes sure that it is one, whatever names are in it.
    pub fn line(&mut self, line: &str) -> Result<(), CliError> {
        self.text(&format!("{}\n", visible(line)))
    }

    /// Prints the JSON document, if one was asked for.
    pub fn json(&mut self, document: &impl Serialize) -> Result<(), CliError> {
        if self.json {
            let text = serde_json::to_string(document).map_err(|error| CliError::failed(error.to_string()))?;
            writeln!(self.out, "{text}")?;
            self.out.flush()?;
        }
        Ok(())
    }
}

/// Refuses two outputs, each an option and its file, that are one file: the second would replace the first. What can not
/// be written is left to the verb, which says why.
pub fn check_apart(outputs: &[(&str, &Path)]) -> Result<(), CliError> {
    let mut seen: Vec<(&str, PathBuf)> = Vec::new();
    for &(option, path) in outputs.iter().filter(|_| outputs.len() > 1) {
        let Ok(target) = check_output(path, &[]) else { continue };
        if let Some((other, _)) = seen.iter().find(|(_, known)| *known == target) {
            let shown = target.display();
            return Err(CliError::usage(format!("{other} and {option} both write {shown}; give them different files")));
        }
        seen.push((option, target));
    }
    Ok(())
}

/// Says something beside the result.
pub fn note(sentence: &str) {
    complain(&format!("eldr: {sentence}"));
}

/// Writes a line to standard error; nobody is left to tell when that fails.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr(), "{}", visible(line));
}

/// Ends the process now, while workers may be in the middle of a step: nothing that they use is taken down under them,
/// which is what `std::process::exit` does to llama.cpp's statics, with a crash for an exit code.
pub fn end_now(code: i32) -> ! {
    let _ = io::stdout().flush();
    #[cfg(unix)]
    signal_hook::low_level::exit(code);
    #[cfg(not(unix))]
    std::process::exit(code)
}

/// The table `rows`, columns aligned, two spaces between them.
pub fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let n = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..n)
        .map(|i| rows.iter().filter_map(|row| row.get(i)).map(|c| c.chars().count()).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_by_characters() {
        let rows = [["a", "bb"], ["\u{e9}\u{e9}\u{e9}", "c"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), ["a    bb", "\u{e9}\u{e9}\u{e9}  c"]);
    }
}
