//! One figure of the page: heading, lead, drawing, and its numbers as a table.
//!
//! Never shows a figure without its numbers.

use std::fmt::Write as _;

use super::text::escape;

/// A figure of the page.
pub(super) struct Section {
    /// Its anchor.
    pub id: &'static str,
    /// What is drawn.
    pub title: &'static str,
    /// What is to be seen, as markup; or why the figure is left out.
    pub lead: String,
    /// How it was made and what is not shown, as markup; may be empty.
    pub note: String,
    /// The drawings, side by side where there is room; none if the figure is left out.
    pub drawings: Vec<String>,
    /// Their numbers.
    pub table: Table,
}

/// A table; cells are markup, the first column's are headers of their rows.
#[derive(Default)]
pub(super) struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Section {
    /// A figure without data.
    pub(super) fn left_out(id: &'static str, title: &'static str, why: &str) -> Self {
        let lead = format!("Left out: {}.", escape(why));
        Self { id, title, lead, note: String::new(), drawings: Vec::new(), table: Table::default() }
    }

    /// As the figure number `n` of the page.
    pub(super) fn markup(&self, n: usize) -> String {
        let Self { id, title, lead, note, drawings, table } = self;
        let mut out = String::new();
        let size = match drawings.len() {
            0 => "none",
            1 => "one",
            _ => "wide",
        };
        let _ = write!(
            out,
            "<figure id=\"{id}\" class=\"{size}\">\n<figcaption><h2><span>{n}</span> {title}</h2><p>{lead}</p></figcaption>\n"
        );
        if !drawings.is_empty() {
            let _ = write!(out, "<div class=\"draw\">\n{}</div>\n", drawings.concat());
        }
        if !note.is_empty() {
            let _ = writeln!(out, "<p class=\"note\">{note}</p>");
        }
        if !table.rows.is_empty() {
            let _ = write!(out, "<details><summary>Numbers</summary>\n{}</details>\n", table.markup());
        }
        out + "</figure>\n"
    }
}

impl Table {
    pub(super) fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(|&cell| escape(cell)).collect(), rows: Vec::new() }
    }

    pub(super) fn markup(&self) -> String {
        let mut out = "<div class=\"scroll\"><table><thead><tr>".to_owned();
        for cell in &self.head {
            let _ = write!(out, "<th scope=\"col\">{cell}</th>");
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        for row in &self.rows {
            let (first, rest) = row.split_first().expect("a row has cells");
            let _ = write!(out, "<tr><th scope=\"row\">{first}</th>");
            for cell in rest {
                let _ = write!(out, "<td>{cell}</td>");
            }
            out.push_str("</tr>\n");
        }
        out + "</tbody></table></div>\n"
    }
}
