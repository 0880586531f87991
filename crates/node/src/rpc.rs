//! The node's gRPC face: checks what came over the wire, then one call of `runs`, `templates` or `build`.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _, stream};
use space_core::limits::{self, CONSOLE_MAX_BYTES};
use space_core::{Generation, RunNumber};
use space_hostd::pool::Area;
use space_proto::node::node_server;
use space_proto::node::{
    BuildEvent, BuildTemplateRequest, CheckpointInfo, CheckpointRef, ConsoleReply, DeleteCheckpointReply,
    DeleteRunReply, DeleteTemplateReply, DeleteTemplateRequest, EndRunReply, GetInfoRequest, ListCheckpointsReply,
    ListCheckpointsRequest, ListRunsReply, ListRunsRequest, ListTemplatesReply, ListTemplatesRequest, NodeInfo, RunRef,
    RunStatus, StartRunRequest, TakeCheckpointRequest, WatchRunsRequest,
};
use tokio_stream::wrappers::{BroadcastStream, ReceiverStream};
use tonic::{Request, Response, Status};

use crate::NodeError;
use crate::build;
use crate::checkpoint::{self, Facts, Wish};
use crate::runs::Runs;

pub struct Service(pub Arc<Runs>);

type Answer<T> = Result<Response<T>, Status>;

fn run_ref(run: Option<RunRef>) -> Result<space_core::RunRef, Status> {
    let run = run.ok_or_else(|| Status::invalid_argument("the call names no run"))?;
    Ok(space_core::RunRef {
        sandbox: run.sandbox.parse().map_err(|e| Status::invalid_argument(format!("{e}")))?,
        run: RunNumber(run.run),
        generation: Generation(run.generation),
    })
}

fn check_start(request: &StartRunRequest) -> Result<(), NodeError> {
    let env: usize = request.env.iter().map(|(k, v)| k.len() + v.len()).sum();
    if request.env.len() > limits::ENV_VARS_MAX || env > limits::ENV_TOTAL_MAX_BYTES {
        return Err(NodeError::Invalid("the environment is too large".to_owned()));
    }
    space_core::name::check_sandbox_name(&request.hostname).map_err(|e| NodeError::Invalid(e.to_string()))
}

#[tonic::async_trait]
impl node_server::Node for Service {
    async fn get_info(&self, _: Request<GetInfoRequest>) -> Answer<NodeInfo> {
        let config = &self.0.config;
        let usage = config.host.usage().map_err(NodeError::from)?;
        Ok(Response::new(NodeInfo {
            node_id: config.node_id.clone(),
            version: config.version.clone(),
            driver: config.driver_label.clone(),
            driver_version: config.driver.version().await.map_err(NodeError::from)?,
            driver_reason: config.driver_reason.clone(),
            cpus: config.cpus,
            memory_total_bytes: config.memory_total_bytes,
            memory_reserved_bytes: self.0.memory.promised(),
            pool_total_bytes: usage.total,
            pool_free_bytes: usage.free,
            data_url: self.0.data_url.clone(),
            runs: u32::try_from(self.0.running()).unwrap_or(u32::MAX),
        }))
    }

    async fn start_run(&self, request: Request<StartRunRequest>) -> Answer<RunStatus> {
        let request = request.into_inner();
        let run = run_ref(request.run.clone())?;
        check_start(&request)?;
        Ok(Response::new(self.0.start(run, request).await?))
    }

    async fn delete_run(&self, request: Request<RunRef>) -> Answer<DeleteRunReply> {
        self.0.delete(run_ref(Some(request.into_inner()))?).await?;
        Ok(Response::new(DeleteRunReply {}))
    }

    async fn pause_run(&self, request: Request<RunRef>) -> Answer<RunStatus> {
        Ok(Response::new(self.0.pause(run_ref(Some(request.into_inner()))?).await?))
    }

    async fn resume_run(&self, request: Request<RunRef>) -> Answer<RunStatus> {
        Ok(Response::new(self.0.resume(run_ref(Some(request.into_inner()))?).await?))
    }

    async fn stop_run(&self, request: Request<RunRef>) -> Answer<RunStatus> {
        Ok(Response::new(self.0.stop(run_ref(Some(request.into_inner()))?).await?))
    }

    async fn end_run(&self, request: Request<RunRef>) -> Answer<EndRunReply> {
        self.0.end(run_ref(Some(request.into_inner()))?).await?;
        Ok(Response::new(EndRunReply {}))
    }

    async fn take_checkpoint(&self, request: Request<TakeCheckpointRequest>) -> Answer<CheckpointInfo> {
        let request = request.into_inner();
        let run = run_ref(request.run)?;
        let id = request.checkpoint.parse().map_err(|e| Status::invalid_argument(format!("{e}")))?;
        let wish = Wish { keep_paused: request.keep_paused, rolling: false };
        Ok(Response::new(self.0.checkpoint(run, id, wish).await?))
    }

    async fn list_checkpoints(&self, request: Request<ListCheckpointsRequest>) -> Answer<ListCheckpointsReply> {
        let sandbox = Some(request.into_inner().sandbox).filter(|name| !name.is_empty());
        let sandbox = sandbox.map(|name| name.parse()).transpose();
        let sandbox = sandbox.map_err(|e: space_core::id::InvalidId| Status::invalid_argument(e.to_string()))?;
        let all = self.0.blocking(move |runs| checkpoint::list(&runs.config.host, sandbox.as_ref())).await?;
        Ok(Response::new(ListCheckpointsReply { checkpoints: all.iter().map(Facts::info).collect() }))
    }

    async fn delete_checkpoint(&self, request: Request<CheckpointRef>) -> Answer<DeleteCheckpointReply> {
        let name = checkpoint::Name::of(&request.into_inner())?;
        self.0.blocking(move |runs| checkpoint::delete(&runs.config.host, &name)).await?;
        Ok(Response::new(DeleteCheckpointReply {}))
    }

    async fn list_runs(&self, _: Request<ListRunsRequest>) -> Answer<ListRunsReply> {
        Ok(Response::new(ListRunsReply { runs: self.0.list() }))
    }

    type WatchRunsStream = Pin<Box<dyn Stream<Item = Result<RunStatus, Status>> + Send>>;

    async fn watch_runs(&self, _: Request<WatchRunsRequest>) -> Answer<Self::WatchRunsStream> {
        // Subscribed before the list is read: nothing falls in between.
        let changes = BroadcastStream::new(self.0.watch());
        let now = stream::iter(self.0.list().into_iter().map(Ok));
        let changes = changes.map(|change| change.map_err(|_| Status::data_loss("too slow; watch again")));
        Ok(Response::new(Box::pin(now.chain(changes))))
    }

    async fn read_console(&self, request: Request<RunRef>) -> Answer<ConsoleReply> {
        let run = run_ref(Some(request.into_inner()))?;
        if let Some(live) = self.0.live(&run.sandbox, run.run.0) {
            let _ = live.machine.vm.drain_console().await;
        }
        let dir = self.0.config.host.path(Area::Sandboxes, run.sandbox.as_str()).map_err(NodeError::from)?;
        let (text, truncated) = build::console(&dir, CONSOLE_MAX_BYTES);
        Ok(Response::new(ConsoleReply { text: text.into(), truncated }))
    }

    type BuildTemplateStream = ReceiverStream<Result<BuildEvent, Status>>;

    async fn build_template(&self, request: Request<BuildTemplateRequest>) -> Answer<Self::BuildTemplateStream> {
        Ok(Response::new(ReceiverStream::new(build::start(self.0.clone(), request.into_inner()))))
    }

    async fn list_templates(&self, _: Request<ListTemplatesRequest>) -> Answer<ListTemplatesReply> {
        let runs = self.0.clone();
        let all = self.0.blocking(|runs| runs.templates.list()).await?;
        let templates = all.iter().map(|template| template.info(runs.made_from(&template.digest))).collect();
        Ok(Response::new(ListTemplatesReply { templates }))
    }

    async fn delete_template(&self, request: Request<DeleteTemplateRequest>) -> Answer<DeleteTemplateReply> {
        let digest = request.into_inner().digest;
        let users = self.0.made_from(&digest);
        if users > 0 {
            let text = format!("{users} sandboxes were made from {digest}; delete them first");
            return Err(NodeError::InUse(text).into());
        }
        self.0.warm.forget(&self.0, &digest).await;
        self.0.blocking(move |runs| runs.templates.delete(&digest)).await?;
        Ok(Response::new(DeleteTemplateReply {}))
    }
}
