//! The one connection that writes, and the task that owns it.
//!
//! Writers queue; those that wait together are committed together (one fsync for all), each in a savepoint of its own so
//! that one refusal undoes only its own work. An answer is given after the commit and never before.

use futures::future::BoxFuture;
use sqlx::{Connection as _, Executor as _, SqliteConnection};
use tokio::sync::{mpsc, oneshot};

use super::StoreError;

/// Writes that wait in line; more make their callers wait.
const QUEUE: usize = 1024;
/// Writes in one commit.
const BATCH: usize = 64;

trait Job: Send {
    /// Does the work; false: undo it.
    fn run<'c>(&'c mut self, conn: &'c mut SqliteConnection) -> BoxFuture<'c, bool>;
    /// Answers, now that the commit is known to have worked or not.
    fn done(self: Box<Self>, commit: Result<(), StoreError>);
}

struct Typed<T, F> {
    work: Option<F>,
    result: Option<Result<T, StoreError>>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Job for Typed<T, F>
where
    T: Send,
    F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>> + Send,
{
    fn run<'c>(&'c mut self, conn: &'c mut SqliteConnection) -> BoxFuture<'c, bool> {
        Box::pin(async move {
            let Some(work) = self.work.take() else { return false };
            let result = work(conn).await;
            let keep = result.is_ok();
            self.result = Some(result);
            keep
        })
    }

    fn done(self: Box<Self>, commit: Result<(), StoreError>) {
        let result = match (self.result, commit) {
            (Some(Err(refused)), _) => Err(refused),
            (Some(Ok(value)), Ok(())) => Ok(value),
            (Some(Ok(_)), Err(failed)) => Err(failed),
            (None, commit) => Err(commit.err().unwrap_or(StoreError::Closed)),
        };
        // A caller that went away misses the answer, not the effect.
        let _ = self.reply.send(result);
    }
}

#[derive(Clone)]
pub struct Writer(mpsc::Sender<Box<dyn Job>>);

impl Writer {
    pub fn new(conn: SqliteConnection) -> Self {
        let (to, jobs) = mpsc::channel(QUEUE);
        tokio::spawn(serve(conn, jobs));
        Self(to)
    }

    /// Runs `work` in a transaction and answers when it is on the disk, or undone.
    pub async fn write<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Typed { work: Some(work), result: None, reply });
        self.0.send(job).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }
}

async fn serve(mut conn: SqliteConnection, mut jobs: mpsc::Receiver<Box<dyn Job>>) {
    let mut batch = Vec::with_capacity(BATCH);
    while jobs.recv_many(&mut batch, BATCH).await > 0 {
        let mut commit = one_commit(&mut conn, &mut batch).await;
        if commit.is_err() {
            let _ = conn.execute("ROLLBACK").await;
        }
        for job in batch.drain(..) {
            let outcome = match &mut commit {
                Ok(()) => Ok(()),
                Err(error) => Err(error.again()),
            };
            job.done(outcome);
        }
    }
    let _ = conn.close().await;
}

async fn one_commit(conn: &mut SqliteConnection, batch: &mut [Box<dyn Job>]) -> Result<(), StoreError> {
    conn.execute("BEGIN IMMEDIATE").await?;
    if let [job] = batch {
        let end = if job.run(conn).await { "COMMIT" } else { "ROLLBACK" };
        conn.execute(end).await?;
        return Ok(());
    }
    for job in batch {
        conn.execute("SAVEPOINT job").await?;
        if !job.run(conn).await {
            conn.execute("ROLLBACK TO job").await?;
        }
        conn.execute("RELEASE job").await?;
    }
    conn.execute("COMMIT").await?;
    Ok(())
}
