//! Benches beyond a single one: sweeps and repeats into rows, and the fit of a device's costs.
//!
//! Never measures by itself.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    str::FromStr,
};

use eldr::{
    bench::{
        self, BenchError, BenchParams, CostFit, Progress,
        rows::{ROWS_VERSION, Row, Rows, markdown, rows_of},
        workload::Arrivals,
    },
    engine::{WorkerList, replace_file},
    route::PolicyKind,
    types::shown,
};
use serde_json::{Value, json};

use super::{
    error::{CliError, Kind},
    lists::Many,
    output::{Output, columns},
    progress,
};

/// What can be swept.
const NAMES: [&str; 5] = ["rate", "workers", "slots", "concurrency", "tau"];

/// One setting and its values, as `rate=1,2,4`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    name: &'static str,
    values: Vec<f64>,
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{}' is not a setting and its values, such as rate=1,2,4", shown(text));
        let (name, values) = text.split_once('=').ok_or_else(wrong)?;
        let known = NAMES.into_iter().find(|known| *known == name.trim());
        let name = known.ok_or_else(|| format!("'{}' can not be swept; {} can", shown(name), NAMES.join(", ")))?;
        let values: Vec<f64> = values.parse::<Many<f64>>().map_err(|_| wrong())?.values().collect();
        let is_whole = |value: &f64| value.fract() == 0.0 && (1.0..=1e9).contains(value);
        let fits = match name {
            "rate" => values.iter().all(|value| value.is_finite() && *value > 0.0),
            "tau" => values.iter().all(|value| (0.0..=2.0).contains(value)),
            _ => values.iter().all(is_whole),
        };
        if !fits {
            return Err(format!("'{}' holds a number that {name} can not be", shown(text)));
        }
        let again = (1..values.len()).find(|&at| values[..at].iter().any(|value| value.total_cmp(&values[at]).is_eq()));
        match again {
            Some(at) => Err(format!("'{}' holds {} twice; leave one out", shown(text), values[at])),
            None => Ok(Self { name, values }),
        }
    }
}

impl Sweep {
    fn set(&self, value: f64, params: &mut BenchParams) {
        let whole = value as u32;
        match self.name {
            "rate" => {
                params.arrivals = match params.arrivals {
                    Arrivals::Bursts { on, off, .. } => Arrivals::Bursts { rate: value, on, off },
                    _ => Arrivals::Poisson { rate: value },
                };
            }
            "workers" => params.config.decode = WorkerList::best(whole),
            "slots" => params.config.n_slots = whole,
            "concurrency" => params.concurrency = Some(whole as usize),
            _ => params.config.tau = Some(value as f32),
        }
    }

    fn shown(&self, value: f64) -> Value {
        if matches!(self.name, "rate" | "tau") { json!(value) } else { json!(value as u64) }
    }
}

/// Refuses sweeps in which runs would be alike: a setting that is swept twice, or that no policy heeds; and such as have a
/// run in them that can not start.
pub fn check(sweeps: &[Sweep], params: &BenchParams) -> Result<(), CliError> {
    apart(sweeps, &params.policies)?;
    for (params, _) in points(params, sweeps) {
        params.config.check().map_err(|problems| CliError::problems(Kind::Usage, &problems))?;
    }
    Ok(())
}

fn apart(sweeps: &[Sweep], policies: &[PolicyKind]) -> Result<(), CliError> {
    let twice =
        sweeps.iter().enumerate().find(|(at, sweep)| sweeps[..*at].iter().any(|other| other.name == sweep.name));
    if let Some((_, Sweep { name, .. })) = twice {
        return Err(CliError::usage(format!("--sweep {name} is given twice; give all values of {name} at once")));
    }
    if sweeps.iter().any(|sweep| sweep.name == "tau") && !policies.contains(&PolicyKind::LocalityBand) {
        return Err(CliError::usage(
            "--sweep tau compares widths of the locality band, which no policy here has: name locality_band among \
             --policies and give a --calibration",
        ));
    }
    Ok(())
}

/// Every combination of the sweeps' values, set in `params`, with what was set.
fn points(params: &BenchParams, sweeps: &[Sweep]) -> Vec<(BenchParams, BTreeMap<String, Value>)> {
    let mut setting = BTreeMap::from([("slots".to_owned(), json!(params.config.n_slots))]);
    setting.extend(params.concurrency.map(|n| ("concurrency".to_owned(), json!(n))));
    let mut points = vec![(params.clone(), setting)];
    for sweep in sweeps {
        let each = |(params, setting): &(BenchParams, BTreeMap<String, Value>)| {
            let at = |&value: &f64| {
                let (mut params, mut setting) = (params.clone(), setting.clone());
                sweep.set(value, &mut params);
                setting.insert(sweep.name.to_owned(), sweep.shown(value));
                (params, setting)
            };
            sweep.values.iter().map(at).collect::<Vec<_>>()
        };
        points = points.iter().flat_map(each).collect();
    }
    points
}

/// Benches every combination, `repeats` times; one repeat of all before the next, so that a machine that grows slower slows
/// all alike.
pub fn sweep(params: &BenchParams, sweeps: &[Sweep], repeats: u32) -> Result<Rows, CliError> {
    let points = points(params, sweeps);
    let mut all: Vec<Row> = Vec::new();
    let (mut notes, mut environment) = (Vec::new(), None);
    for repeat in 0..repeats {
        for (params, setting) in &points {
            let mut params = params.clone();
            params.seed = params.seed.wrapping_add(u64::from(repeat));
            let mut setting = setting.clone();
            setting.insert("repeat".to_owned(), json!(repeat));
            let report = watched(&params, |params, hear| bench::run(params, hear))?;
            all.extend(rows_of(&report, &setting));
            if environment.is_none() {
                (notes, environment) = (report.notes, report.environment);
            }
        }
    }
    notes.extend(sweeps.iter().filter(|sweep| sweep.name == "slots").filter_map(|sweep| best_batch(sweep, &all)));
    Ok(Rows { version: ROWS_VERSION, environment, notes, rows: all })
}

/// Which of the slots that were compared makes the most tokens, over all rows with so many.
fn best_batch(slots: &Sweep, rows: &[Row]) -> Option<String> {
    let rate = |&value: &f64| {
        let own = rows.iter().filter(|row| row.setting.get("slots") == Some(&slots.shown(value)));
        let rates: Vec<f64> = own.filter_map(|row| row.measured.get("tokens_per_s").copied()).collect();
        (!rates.is_empty()).then(|| (value, rates.iter().sum::<f64>() / rates.len() as f64))
    };
    let (best, rate) = slots.values.iter().filter_map(rate).max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(format!("The best batch size of those compared is {best}: {rate:.0} tokens a second over all workers."))
}

/// Fits the device's costs, shows how well they fit, and writes them to `path`.
pub fn fit(params: &BenchParams, path: &Path, output: &mut Output) -> Result<Rows, CliError> {
    let fit = watched(params, bench::fit_cost)?;
    let text = toml::to_string(&fit.cost).map_err(CliError::failed)?;
    write(path, &text)?;
    for line in shown_fit(&fit, path) {
        output.line(&line)?;
    }
    Ok(rows_of_fit(&fit))
}

fn rows_of_fit(fit: &CostFit) -> Rows {
    let row = |size: &bench::BatchFit| {
        let mut measured = BTreeMap::from([
            ("step_ms".to_owned(), size.step_ms),
            ("experts_per_step".to_owned(), size.experts),
            ("tokens_per_s".to_owned(), size.tokens_per_s),
            ("bias".to_owned(), size.bias),
            ("steps".to_owned(), size.n_steps as f64),
        ]);
        measured.extend(size.gb_per_s.map(|rate| ("gb_per_s".to_owned(), rate)));
        let share = size.gb_per_s.zip(fit.environment.read_gb_per_s).map(|(rate, all)| rate / all);
        measured.extend(share.map(|share| ("bandwidth_share".to_owned(), share)));
        Row { verb: "batch".to_owned(), setting: [("batch".to_owned(), json!(size.batch))].into(), measured }
    };
    let notes = vec![format!("What steps take: {}.", fit.cost.source)];
    let rows = fit.batches.iter().map(row).collect();
    Rows { version: ROWS_VERSION, environment: Some(fit.environment.clone()), notes, rows }
}

fn shown_fit(fit: &CostFit, path: &Path) -> Vec<String> {
    let head = ["batch", "steps", "step ms", "fit off by", "experts", "tokens/s", "GB/s", "of memory"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(fit.batches.iter().map(|size| {
        let share = size.gb_per_s.zip(fit.environment.read_gb_per_s).map(|(rate, all)| rate / all);
        vec![
            size.batch.to_string(),
            size.n_steps.to_string(),
            format!("{:.3}", size.step_ms),
            format!("{:+.1}%", size.bias * 100.0),
            format!("{:.1}", size.experts),
            format!("{:.0}", size.tokens_per_s),
            size.gb_per_s.map_or("-".to_owned(), |rate| format!("{rate:.2}")),
            share.map_or("-".to_owned(), |share| format!("{:.0}%", share * 100.0)),
        ]
    }));
    let mut lines = columns(&rows);
    let decode = fit.cost.decode;
    lines.push(format!(
        "a decode step takes {:.4} ms + {:.5} x distinct experts + {:.5} x sequences + {:.3e} x tokens of context; mean error \
         {:.1}%, 95% within {:.1}%; {} steps, {} left out",
        decode.fixed,
        decode.per_expert,
        decode.per_token,
        decode.per_kv_token,
        fit.decode_error.0 * 100.0,
        fit.decode_error.1 * 100.0,
        fit.n_steps.0,
        fit.n_steps.1
    ));
    lines.push(format!(
        "a prefill step takes {:.4} ms + {:.5} x tokens + {:.3e} x tokens of context; mean error {:.1}%, 95% within {:.1}%",
        fit.cost.prefill.fixed,
        fit.cost.prefill.per_token,
        fit.cost.prefill.per_kv_token,
        fit.prefill_error.0 * 100.0,
        fit.prefill_error.1 * 100.0
    ));
    if let Some((best, falls)) = fit.best_batch() {
        let falls = falls.map_or_else(String::new, |at| format!("; beyond {at} a larger batch was slower at first"));
        lines.push(format!("the best batch of those measured is {best}{falls}"));
    }
    lines.push(format!("wrote {}", path.display()));
    lines
}

/// Runs a bench behind a progress bar.
pub fn watched<T>(
    params: &BenchParams,
    run: impl Fn(&BenchParams, &mut dyn FnMut(Progress)) -> Result<T, BenchError>,
) -> Result<T, CliError> {
    let bar = progress::bar(0, "loading");
    let result = run(params, &mut |Progress { policy, counting, n_done, n_requests }| {
        bar.set_message(if counting { format!("{policy}, counting") } else { policy.to_string() });
        bar.set_length(n_requests as u64);
        bar.set_position(n_done as u64);
    });
    bar.finish_and_clear();
    result.map_err(|error| match error {
        BenchError::Engine(error) => error.into(),
        BenchError::Stuck { .. } | BenchError::OtherSchedule | BenchError::Client => CliError::failed(error),
        _ => CliError::input(error),
    })
}

/// Writes rows, and shows their table.
pub fn show(rows: &Rows, path: Option<&PathBuf>, output: &mut Output) -> Result<(), CliError> {
    if let Some(path) = path {
        write(path, &rows.to_json())?;
    }
    output.text(&markdown(rows))
}

/// Writes a file whole or not at all.
pub fn write(path: &Path, text: &str) -> Result<(), CliError> {
    replace_file(path, text.as_bytes())
        .map_err(|error| CliError::failed(format!("cannot write {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_batch_makes_the_most_tokens() {
        let slots: Sweep = "slots=4,8,16".parse().expect("a sweep");
        let row = |slots: u64, rate: f64| Row {
            verb: "bench".to_owned(),
            setting: [("slots".to_owned(), json!(slots))].into(),
            measured: [("tokens_per_s".to_owned(), rate)].into(),
        };
        let rows = [row(4, 100.0), row(8, 190.0), row(16, 150.0), row(8, 170.0), row(16, 200.0)];
        let told = best_batch(&slots, &rows).expect("rates");
        assert_eq!(told, "The best batch size of those compared is 8: 180 tokens a second over all workers.");
        assert_eq!(best_batch(&slots, &[]), None);
    }

    // Symptom: `--sweep tau=0.1,0.2 --policies round_robin` measured the same thing twice, as `--sweep slots=4,4` did, and
    // of `--sweep rate=1 --sweep rate=2` the second alone counted.
    #[test]
    fn a_sweep_that_compares_nothing_is_refused() {
        let sweeps = |texts: &[&str]| texts.iter().map(|text| text.parse().expect(text)).collect::<Vec<Sweep>>();
        let refused = |texts, kinds: &[PolicyKind]| apart(&sweeps(texts), kinds).err().map(|error| error.message);
        let tau = &["tau=0.1,0.2"][..];
        let told = refused(tau, &[PolicyKind::RoundRobin, PolicyKind::MarginalCost]).expect("refused");
        assert!(
            told.starts_with("--sweep tau compares widths of the locality band, which no policy here has"),
            "{told}"
        );
        assert_eq!(refused(tau, &[PolicyKind::RoundRobin, PolicyKind::LocalityBand]), None);
        let told = refused(&["rate=1", "slots=4", "rate=2"], &[PolicyKind::RoundRobin]).expect("refused");
        assert_eq!(told, "--sweep rate is given twice; give all values of rate at once");
        let error = "slots=4,8,4".parse::<Sweep>().expect_err("the same");
        assert_eq!(error, "'slots=4,8,4' holds 4 twice; leave one out");
    }

    #[test]
    fn settings_and_values_are_read() {
        assert_eq!("rate=1, 2.5".parse(), Ok(Sweep { name: "rate", values: vec![1.0, 2.5] }));
        for (text, want) in [
            ("rate", "such as rate=1,2,4"),
            ("rate=a", "such as rate=1,2,4"),
            ("speed=1", "can not be swept; rate, workers"),
            ("slots=1.5", "holds a number that slots can not be"),
            ("tau=3", "holds a number that tau can not be"),
            ("rate=0", "holds a number that rate can not be"),
        ] {
            let error = text.parse::<Sweep>().expect_err(text);
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
