use std::io;

use super::Reload;

/// What asks the process to end.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    pub fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next of them.
    pub async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
impl Signals {
    pub fn new() -> io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next of them.
    pub async fn stop(&mut self) {
        // Where there is no such signal, the process is ended from outside.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Answers every SIGHUP, which ends the process otherwise.
#[cfg(unix)]
pub(super) fn reload_on_hangup(reload: Option<Reload>) -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangups = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            let Some(reload) = reload.clone() else {
                log::warn!("SIGHUP: there is nothing to read again: the server was started without a calibration");
                continue;
            };
            match tokio::task::spawn_blocking(move || reload()).await {
                Ok(Ok(what)) => log::info!("SIGHUP: {what}"),
                Ok(Err(why)) => log::error!("SIGHUP: nothing was changed: {why}"),
                Err(_) => log::error!("SIGHUP: nothing was changed: reading again panicked"),
            }
        }
    });
    Ok(())
}

#[cfg(not(unix))]
pub(super) fn reload_on_hangup(_reload: Option<Reload>) -> io::Result<()> {
    Ok(())
}
