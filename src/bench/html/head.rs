//! The page's head: the model, the fit in numbers, the verdict.
//!
//! Never softens the verdict.

use std::fmt::Write as _;

use super::{
    section::Table,
    text::{change, count, escape, fixed, maybe, n_of, name},
};
use crate::figures::{Figure, ReportData, Verdict};

pub(super) fn markup(data: &ReportData) -> String {
    let model = data.model.as_deref().unwrap_or(&data.fingerprint);
    let shape = &data.shape;
    let mut out = format!(
        "<header>\n<p class=\"kind\">eldr calibration report</p>\n<h1>{}</h1>\n<p class=\"shape\">{} of {}, {} each, {} a \
         token &middot; <code>{}</code></p>\n",
        name(model),
        n_of(shape.n_layer_moe(), "MoE layer"),
        shape.n_layer,
        n_of(shape.n_expert as usize, "expert"),
        shape.n_expert_used,
        name(&data.fingerprint)
    );
    match &data.verdict {
        Figure::Data(verdict) => out.push_str(&verdict_markup(verdict)),
        Figure::LeftOut(why) => {
            let _ = writeln!(out, "<p class=\"verdict open\">{}.</p>", escape(&capital(why)));
        }
    }
    let summary = &data.summary;
    let layers: Vec<String> = summary.layers.iter().map(ToString::to_string).collect();
    let facts = [
        ("requests", count(summary.n_requests as u64), String::new()),
        ("prompt tokens", count(summary.n_tokens), String::new()),
        ("decode steps", count(summary.n_steps), String::new()),
        ("decode workers", count(summary.n_workers as u64), format!("seed {}", summary.seed)),
        (
            "rho",
            fixed(summary.rho, 3),
            data.mask.rho_all_layers.map_or_else(String::new, |rho| format!("{} with all layers", fixed(rho, 3))),
        ),
        ("layers kept, N*", format!("{} of {}", summary.layers.len(), shape.usable().len()), shown(&layers)),
        ("tau", trimmed(summary.tau), String::new()),
        ("purity by label", maybe(data.clusters.purity), String::new()),
    ];
    out.push_str("<dl>\n");
    for (term, value, remark) in facts {
        let remark = if remark.is_empty() { remark } else { format!("<small>{}</small>", escape(&remark)) };
        let _ = writeln!(out, "<div><dt>{term}</dt><dd>{}{remark}</dd></div>", escape(&value));
    }
    out + "</dl>\n</header>\n"
}

fn verdict_markup(verdict: &Verdict) -> String {
    let class = if verdict.helps { "yes" } else { "no" };
    let mut table = Table::new(&["on held-out requests", "change", "confidence interval"]);
    for number in &verdict.numbers {
        let interval = number
            .interval
            .map_or_else(|| "&ndash;".to_owned(), |[low, high]| format!("{} to {}", change(low), change(high)));
        table.rows.push(vec![name(&number.name), change(number.change), interval]);
    }
    let table = if table.rows.is_empty() { String::new() } else { table.markup() };
    let sentence = capital(verdict.sentence.trim_end_matches('.'));
    let said = match sentence.split_once(": ") {
        Some((claim, numbers)) => format!("<strong>{}:</strong> {}", escape(claim), escape(numbers)),
        None => escape(&sentence),
    };
    format!("<div class=\"verdict {class}\"><p><bdi>{said}.</bdi></p>\n{table}</div>\n")
}

/// The layers' numbers, as many as fit.
fn shown(layers: &[String]) -> String {
    const MOST: usize = 8;
    let list = layers[..layers.len().min(MOST)].join(", ");
    match layers.len() {
        1 => format!("layer {list}"),
        2..=MOST => format!("layers {list}"),
        _ => format!("{list}, \u{2026}"),
    }
}

fn trimmed(x: f64) -> String {
    let text = fixed(x, 3);
    text.strip_suffix('0').unwrap_or(&text).to_owned()
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
