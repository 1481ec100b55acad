//! What the cluster of each decode worker holds.
//!
//! Never draws a share: bars are requests, so that sizes can be compared.

use super::{
    labels,
    plot::{Scale, WIDTH},
    section::{Section, Table},
    svg::Svg,
    text::{count, fixed, n_of, name, percent},
};
use crate::figures::{Cluster, ReportData};

const ID: &str = "clusters";
const TITLE: &str = "What each worker&rsquo;s cluster holds";
const ROW: f64 = 22.0;
const LEFT: f64 = 58.0;
const TOP: f64 = 18.0;
/// Clusters drawn at most.
const MAX_ROWS: usize = 48;

pub(super) fn section(data: &ReportData) -> Section {
    let clusters = &data.clusters.clusters;
    let labels = &data.labels;
    let mut head = vec!["worker".to_owned(), "requests".to_owned(), "purity".to_owned()];
    head.extend(labels.names.iter().map(|label| name(label)));
    let has_others = labels.n_other_labels > 0;
    head.extend(has_others.then(|| "others".to_owned()));
    let rows = clusters.iter().enumerate().map(|(worker, cluster)| {
        let mut row = vec![worker.to_string(), count(cluster.size as u64), purity(cluster)];
        row.extend(cluster.n_of_label.iter().map(ToString::to_string));
        row.extend(has_others.then(|| cluster.n_other.to_string()));
        row
    });
    let table = Table { head, rows: rows.collect() };
    let sizes = || clusters.iter().map(|cluster| cluster.size);
    let lead = match data.clusters.purity {
        Some(purity) => format!(
            "{} of the labelled requests carry the commonest label of their cluster (purity {}).",
            percent(purity, 0),
            fixed(purity, 2)
        ),
        None => "The prompts have no labels, so only the sizes can be shown.".to_owned(),
    };
    let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
    let size = if least == most { least.to_string() } else { format!("{least} to {most}") };
    let n = n_of(clusters.len(), "cluster");
    let mut notes = vec![format!("{n} of {size} requests each. Labels take no part in the fit.")];
    if data.summary.n_without_signature > 0 {
        let n = n_of(data.summary.n_without_signature, "request");
        notes.push(format!("{n} without a signature are in none."));
    }
    if clusters.len() > MAX_ROWS {
        notes.push(format!("The first {MAX_ROWS} are drawn; the table has all."));
    }
    Section { id: ID, title: TITLE, lead, note: notes.join(" "), drawings: vec![drawing(data)], table }
}

fn purity(cluster: &Cluster) -> String {
    cluster.purity.map_or_else(|| "\u{2013}".to_owned(), |purity| percent(purity, 0))
}

fn drawing(data: &ReportData) -> String {
    let clusters = &data.clusters.clusters[..data.clusters.clusters.len().min(MAX_ROWS)];
    let legend = labels::Legend::of(&data.labels, data.labels.n_other_labels > 0);
    let mut svg = Svg::new(WIDTH, TOP + ROW * clusters.len() as f64 + legend.height() + 6.0);
    let largest = clusters.iter().map(|cluster| cluster.size).max().unwrap_or(0).max(1);
    let has_purity = data.clusters.purity.is_some();
    let right = if has_purity { WIDTH - 50.0 } else { WIDTH - 30.0 };
    let scale = Scale::linear((0.0, largest as f64), (LEFT, right - 26.0));
    svg.text("t e", (LEFT - 8.0, 11.0), "worker");
    if has_purity {
        svg.text("t e", (WIDTH, 11.0), "purity");
    }
    for (worker, cluster) in clusters.iter().enumerate() {
        let y = TOP + ROW * worker as f64;
        svg.text("l e", (LEFT - 8.0, y + 12.0), &worker.to_string());
        let n_unlabelled = cluster.size.saturating_sub(cluster.n_of_label.iter().sum::<usize>() + cluster.n_other);
        let labelled = cluster.n_of_label.iter().enumerate().map(|(place, &n)| (format!("f{place}"), n));
        let rest = [("fo".to_owned(), cluster.n_other), ("fu".to_owned(), n_unlabelled)];
        let mut from = 0;
        for (class, n) in labelled.chain(rest).filter(|(_, n)| *n > 0) {
            let (x, end) = (scale.at(from as f64), scale.at((from + n) as f64));
            let width = (end - x - 1.0).max(0.5);
            svg.rect(&class, (x, y), (width, ROW - 6.0));
            if width > 8.0 + 6.5 * n.to_string().len() as f64 {
                svg.text("in m", (x + width / 2.0, y + 12.0), &n.to_string());
            }
            from += n;
        }
        svg.text("t", (scale.at(cluster.size as f64) + 5.0, y + 12.0), &cluster.size.to_string());
        if has_purity {
            svg.text("l e", (WIDTH, y + 12.0), &purity(cluster));
        }
    }
    legend.draw(&mut svg, (0.0, TOP + ROW * clusters.len() as f64 + 14.0), false);
    let described: Vec<String> = clusters
        .iter()
        .enumerate()
        .map(|(worker, cluster)| format!("worker {worker} {} requests, purity {}", cluster.size, purity(cluster)))
        .collect();
    svg.finish(ID, "Requests of each worker's cluster by label", &format!("{}.", described.join("; ")))
}
