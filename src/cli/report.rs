//! `eldr report`: tables and charts of rows that were measured before.
//!
//! Never measures, and never shows a number that the rows do not hold.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use eldr::{
    bench::rows::{Rows, markdown, page, svg},
    engine::{check_output, replace_file},
};

use super::{error::CliError, output::Output};

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Print one JSON document: the rows of all files
    #[arg(long)]
    pub json: bool,
    /// Files of rows, from `eldr simulate -o`, `eldr bench --rows` and the growth bench
    #[arg(value_name = "ROWS", required = true)]
    rows: Vec<PathBuf>,
    /// Write the tables there, as Markdown, instead of printing them
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Write a page of tables and charts there
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
    /// Draw the charts there
    #[arg(long, value_name = "OUT")]
    svg: Option<PathBuf>,
}

impl ReportArgs {
    /// The files it writes, each with its option.
    pub fn outputs(&self) -> Vec<(&'static str, &Path)> {
        let all = [("--output", &self.output), ("--html", &self.html), ("--svg", &self.svg)];
        all.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?))).collect()
    }

    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let inputs: Vec<&Path> = self.rows.iter().map(PathBuf::as_path).collect();
        for (_, path) in self.outputs() {
            check_output(path, &inputs).map_err(CliError::usage)?;
        }
        if let Some(path) = self.twice() {
            let path = path.display();
            return Err(CliError::usage(format!(
                "{path} is given twice, and its rows would count as repeats: leave one out"
            )));
        }
        let rows = self.read()?;
        let tables = markdown(&rows);
        let charts = self.svg.as_ref().map(|path| (path, svg(&rows)));
        if let Some(path) = &self.html {
            write(path, &page(&rows))?;
        }
        match &self.output {
            Some(path) => write(path, &tables)?,
            None => output.text(&tables)?,
        }
        match charts {
            Some((path, Some(charts))) => write(path, &charts)?,
            Some((path, None)) => {
                return Err(CliError::input(format!(
                    "{} was not written: there is nothing to draw, since no setting has two numbers to draw a line \
                     between; the tables are whole",
                    path.display()
                )));
            }
            None => {}
        }
        output.json(&rows)
    }

    /// A file of rows that another one is, by whatever name.
    fn twice(&self) -> Option<&Path> {
        let files: Vec<Option<PathBuf>> = self.rows.iter().map(|path| path.canonicalize().ok()).collect();
        let again = (1..files.len()).find(|&at| files[at].is_some() && files[..at].contains(&files[at]))?;
        Some(&self.rows[again])
    }

    /// The rows of all files, one after another; the first file's environment.
    fn read(&self) -> Result<Rows, CliError> {
        let mut all: Option<Rows> = None;
        for path in &self.rows {
            let text = fs::read_to_string(path)
                .map_err(|error| CliError::input(format!("cannot read the rows {}: {error}", path.display())))?;
            let rows =
                Rows::from_json(&text).map_err(|error| CliError::input(format!("{}: {error}", path.display())))?;
            match &mut all {
                None => all = Some(rows),
                Some(all) => {
                    all.rows.extend(rows.rows);
                    let new = rows.notes.into_iter().filter(|note| !all.notes.contains(note)).collect::<Vec<_>>();
                    all.notes.extend(new);
                    all.environment = all.environment.take().or(rows.environment);
                }
            }
        }
        all.ok_or_else(|| CliError::usage("no file of rows is given".to_owned()))
    }
}

/// Writes a file whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), CliError> {
    replace_file(path, text.as_bytes())
        .map_err(|error| CliError::failed(format!("cannot write {}: {error}", path.display())))
}
