def docker_answers(): return False
