//! What the doctor found, in order.
//!
//! Never ends anything: a broken finding is told with the others.

use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Ok,
    Warning,
    Broken,
}

/// One line of the diagnosis; `advice` is what to do, and empty where nothing is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: Level,
    pub message: String,
    pub advice: String,
}

#[derive(Debug, Default)]
pub struct Findings(pub Vec<Finding>);

impl Findings {
    fn add(&mut self, level: Level, message: impl Into<String>, advice: impl Into<String>) {
        self.0.push(Finding { level, message: message.into(), advice: advice.into() });
    }

    pub fn ok(&mut self, message: impl Into<String>) {
        self.add(Level::Ok, message, "");
    }

    pub fn warn(&mut self, message: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Warning, message, advice);
    }

    pub fn broken(&mut self, message: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Broken, message, advice);
    }
}

impl Finding {
    pub fn line(&self) -> String {
        let level = match self.level {
            Level::Ok => "ok     ",
            Level::Warning => "warning",
            Level::Broken => "broken ",
        };
        match self.advice.as_str() {
            "" => format!("{level}  {}", self.message),
            advice => format!("{level}  {}: {advice}", self.message),
        }
    }
}
