use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore, time::sleep};

use super::{Ended, app::App};

/// Bytes of a request's head, and its lines.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 64;
/// Time that answers which were cut short get to say so.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Answers on `listener` until `stop`; then lets what is running end, within the limit, and cuts short what is not.
pub(super) async fn serve(
    app: &Arc<App>,
    router: Router,
    listener: TcpListener,
    stop: impl Future<Output = ()>,
) -> Ended {
    let mut stop = std::pin::pin!(stop);
    let connections = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(app.config.max_connections));
    let mut http = http1::Builder::new();
    // Also the longest time a connection may stay open without a request.
    http.timer(TokioTimer::new()).header_read_timeout(app.config.header_timeout);
    http.max_buf_size(MAX_HEAD).max_headers(MAX_HEADERS);
    loop {
        let accept = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = &mut stop => break,
            accepted = accept => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Of one connection, or because files ran out, which others will give back.
                log::debug!("a connection was not accepted: {error}");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Tokens are small and should not wait for one another.
        if let Err(error) = stream.set_nodelay(true) {
            log::debug!("a connection may lag: {error}");
        }
        let service = TowerToHyperService::new(router.clone());
        let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                log::debug!("a connection ended early: {error}");
            }
            drop(place);
        });
    }
    drop(listener);
    app.stop_accepting();
    log::info!("shutting down: no more requests are taken, {} are running", app.engine.stats().n_active);
    let mut ended = std::pin::pin!(connections.shutdown());
    let in_time = tokio::select! {
        () = &mut ended => true,
        () = sleep(app.config.drain_timeout) => false,
    };
    if in_time {
        return Ended::Drained;
    }
    let n = app.engine.stats().n_active;
    log::warn!("{n} requests did not end within the limit and are cut short");
    app.cut_short();
    let all_read = tokio::select! {
        () = &mut ended => true,
        () = sleep(LAST_WORDS) => false,
    };
    if n == 0 && all_read { Ended::Drained } else { Ended::CutShort }
}
